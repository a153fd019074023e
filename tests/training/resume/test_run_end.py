"""How a run ends whose script does not say so."""

import gc
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import lockstep as ls
import warm
from lockstep.kernel.errors import LossError, RankError
from lockstep.record.reader import read_run
from lockstep.training.resume import run_end

SGD = partial(torch.optim.SGD, lr=0.1)
BATCH = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
STAGES = {"pipeline": ls.PipelineConfig(stages=2, balance=[1, 1])}


def build(folder, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return ls.Trainer(model, nn.CrossEntropyLoss(), SGD, loggers=folder, **options)


def test_a_rank_that_returns_ends_its_run(ranks, tmp_path):
    def train():
        trainers = [build(tmp_path / "whole"), build(tmp_path / "stages", **STAGES)]
        return [trainer.step(BATCH) for trainer in trainers]

    ranks(train, 2)
    whole = read_run(tmp_path / "whole")
    stages = read_run(tmp_path / "stages")
    assert (whole.state, stages.state) == ("done", "done")
    assert len(whole.end["digest"]) == 64
    assert "digest" not in stages.end  # all ranks would have to make it


def test_a_rank_that_raises_or_exits_ends_its_run_as_failed(ranks, tmp_path):
    def train(exit_status):
        build(tmp_path / str(exit_status)).step(BATCH)
        if exit_status is None:
            raise KeyError("mine")
        sys.exit(exit_status)

    for status in (None, 3, 75):
        with pytest.raises((RankError, SystemExit)):
            ranks(train, 1, status)
    found = [read_run(tmp_path / name) for name in ("None", "3", "75")]
    assert [run.state for run in found] == ["failed", "failed", "stopped"]
    assert [run.end.get("message") for run in found[:2]] == [
        "KeyError: 'mine'",
        "the script called sys.exit(3)",
    ]


SCRIPT = """
import os, sys, torch
from functools import partial
import lockstep as ls

def main(ending):
    ls.init()
    model = torch.nn.Linear(4, 2)
    trainer = ls.Trainer(model, torch.nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1),
                         loggers="runs/" + ending, checkpoint=ls.CheckpointConfig(every_steps=1))
    trainer.step((torch.ones(8, 4), torch.zeros(8, dtype=torch.long)))
    if os.fork() == 0:
        sys.exit()  # runs atexit handlers, too
    os.wait()
    if ending == "raised":
        raise KeyError("mine")
    if ending == "interrupted":
        raise KeyboardInterrupt
    if ending == "last":
        sys.last_value, sys.ps1 = KeyError("of an earlier cell"), ">>> "

main(sys.argv[1])
"""


def test_a_script_under_plain_python_ends_its_run(tmp_path):
    for ending in ("normal", "raised", "interrupted", "last"):
        command = [sys.executable, "-c", SCRIPT, ending]
        if ending == "normal":  # once with the interpreter's own end
            subprocess.run(command, cwd=tmp_path, timeout=60, check=True)
        else:
            warm.run(command, cwd=tmp_path, timeout=60)
    found = {path.name: read_run(path) for path in (tmp_path / "runs").iterdir()}
    states = {name: (run.state, run.end.get("message")) for name, run in found.items()}
    assert states == {
        "normal": ("done", None),
        "raised": ("failed", "KeyError: 'mine'"),
        "interrupted": ("failed", "KeyboardInterrupt: "),
        "last": ("done", None),
    }
    for run in found.values():
        lines = (run.folder / "record.jsonl").read_text().splitlines()
        assert sum('"kind":"end"' in line for line in lines) == 1
        assert [line["step"] for line in run.checkpoints] == [1]


@pytest.mark.usefixtures("world_of_one")
def test_a_trainer_that_is_dropped_ends_its_run(tmp_path):
    first = build(tmp_path / "first")
    with pytest.raises(LossError):
        first.step((BATCH[0] * float("nan"), BATCH[1]))
    broken = build(tmp_path / "broken")
    with pytest.raises(RuntimeError):
        broken.step((torch.ones(8, 5), BATCH[1]))
    second = build(tmp_path / "second")
    third = build(tmp_path / "third")
    del first, broken, second
    gc.collect()
    assert read_run(tmp_path / "first").state == "failed"
    end = read_run(tmp_path / "first").end
    assert "the loss is nan" in end["message"]
    assert end["value"] == "nan"
    assert read_run(tmp_path / "broken").end["reason"].startswith("mat1 and mat2")
    assert read_run(tmp_path / "second").state == "done"
    del third
    gc.collect()
    assert read_run(tmp_path / "third").state == "running"  # kept, for its digests
    run_end._end_all()
    assert len(read_run(tmp_path / "third").end["digest"]) == 64
    fourth = build(tmp_path / "fourth")
    fourth.finish("stopped")
    run_end._end_all()
    assert read_run(tmp_path / "fourth").state == "stopped"
    assert os.getpid() == run_end._owner
    assert run_end._newest is None
