"""`lockstep audit`: a recorded run, computed again by machines that are right or wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

import bit_flips
from bit_flips import flip_bit_in_file
from lockstep.checkpoint.folder import count_steps, find_checkpoints
from lockstep.cli import cli
from lockstep.kernel.errors import UsageError

SCRIPT = """
import contextlib
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from bit_flips import FaultyOperator

machine = Path("machine").read_text()
element = 5
if machine == "sometimes":
    # Another element in each process: its number is that of the processes before it.
    with Path("computed").open("ab") as computed:
        element = computed.tell()
        computed.write(b".")

ls.init(timeout=60, portable=False)
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 4, (64,)))
with ls.Trainer(
    nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)), nn.CrossEntropyLoss(),
    partial(torch.optim.SGD, lr=0.1), microbatches=4,
    checkpoint=ls.CheckpointConfig(every_steps=3, keep=9),
) as trainer:
    for batch in trainer.batches(data, 8):
        if trainer.steps == 4 and machine == "stops":
            raise RuntimeError("this machine stops")
        faulty = contextlib.nullcontext()
        if trainer.steps == 4 and machine != "right":
            faulty = FaultyOperator("addmm", phase="forward", call=4, element=element)
        with faulty:
            trainer.step(batch)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps in the folder of its script.

    It has checkpoints after 3 and 8 steps, and after 6 or, if the first was still being written, 7.
    """
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(bit_flips.__file__, folder)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "machine").write_text("right")
    # As in the process of the tests, with which the machines are compared.
    with contextlib.chdir(folder), mock.patch.dict(os.environ, ATEN_CPU_CAPABILITY="avx2"):
        done = CliRunner().invoke(cli, ["run", "--name", "mine", "train.py"])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def run(recorded: Path) -> Path:
    """The folder of the run, for which this machine is right."""
    (recorded / "machine").write_text("right")
    return recorded / "runs" / "mine"


def newest_checkpoint(run: Path) -> int:
    """Return the number of steps before the newest checkpoint from which step 7 can be computed."""
    saved = map(count_steps, find_checkpoints(run / "checkpoints"))
    return max(steps for steps in saved if steps < 8)


def audit(run: Path, *words: str):
    words = ("audit", run.name, "--runs", str(run.parent), *words)
    return CliRunner().invoke(cli, words, catch_exceptions=False)


def copy_with(run: Path, to: Path, **environment: str) -> Path:
    """Return a copy of a run that was recorded on another machine, with a finding."""
    copy = Path(shutil.copytree(run, to))
    header, *lines = (copy / "record.jsonl").read_text().splitlines()
    changed = json.loads(header)
    changed["environment"] |= environment
    finding = json.dumps({"kind": "audit", "step": 1, "rank": 0, "message": "step 1: a fault"})
    (copy / "record.jsonl").write_text("\n".join([json.dumps(changed), finding, *lines, ""]))
    return copy


def test_a_machine_that_computes_the_recorded_bits(run):
    done = audit(run, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["equal"], found["failure"]) == ("same", True, None)
    assert found["first"] == newest_checkpoint(run)
    assert (found["last"], found["steps"]) == (7, 8 - found["first"])
    assert 8 in found["digests"]
    assert found["recorded_on"] == found["here"]
    assert "7: this machine computes the recorded bits (" in done.stderr
    done = audit(run, "--steps", "4")
    assert "step 4: this machine computes the recorded bits (1 step)." in done.stdout


def test_a_machine_that_computes_other_bits_every_time(run, tmp_path):
    Path(run.parent.parent / "machine").write_text("always")
    done = audit(run, "--steps", "3-5", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["verdict"], found["step"], found["microbatch"]) == ("different", 4, 2)
    assert (found["what"], found["steps"]) == ("loss of the micro-batch", 3)
    assert float(found["recorded"]) != float(found["computed"])
    said = " ".join(done.stderr.split())
    assert f"step 4: different: the loss of the micro-batch 2 is {found['computed']} here" in said
    assert "twice here, with the same bits: one of these machines, of the same kind" in said
    copy = copy_with(run, tmp_path / "mine", processor="Abacus", hostname="attic")
    said = " ".join(audit(copy, "--steps", "3-5").stdout.split())
    assert "the machines differ (processor): audit it on one like the recorded" in said
    assert "hostname attic" in said
    assert said.endswith("The run itself recorded: step 1: a fault.")


def test_a_machine_that_computes_other_bits_now_and_then(run):
    Path(run.parent.parent / "machine").write_text("sometimes")
    done = audit(run, "--steps", "4", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["verdict"], found["step"]) == ("unstable", 4)
    assert "Computed twice here, with different bits: this machine" in done.stderr


def test_a_damaged_checkpoint_is_named_and_left_out(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "mine"))
    newest = copy / "checkpoints" / f"step-{newest_checkpoint(copy)}"
    flip_bit_in_file(newest / "model.safetensors", -1)
    done = audit(copy, "--steps", "7")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    assert f"the checkpoint {newest} is damaged: the checksum of model.safetensors diff" in said


def test_what_cannot_be_computed_is_one_sentence(run, tmp_path):
    for words, said in (
        (["--steps", "8"], "--steps 8: .* has 8 steps; the last one is 7$"),
        (["--steps", "5-4"], "--steps 5-4: give a step or a range of steps, such as 40-99$"),
        (["--steps", "all"], "--steps all: give a step or a range"),
    ):
        with pytest.raises(UsageError, match=said):
            audit(run, *words)
    with pytest.raises(UsageError, match="there is no run at"):
        audit(tmp_path / "nothing")
    Path(run.parent.parent / "machine").write_text("stops")
    done = audit(run, "--steps", "3-4", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["verdict"], found["steps"], found["equal"]) == ("failed", 1, False)
    said = " ".join(done.stderr.split())
    assert "steps 3 to 4: step 4 was not computed: rank 0 raised RuntimeError: thi" in said
    assert said.endswith("(train.py:31). See lockstep replay mine --step 4.")
    assert found["failure"] in said
