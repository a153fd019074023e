"""Scripts of a user, recorded in one layout and replayed in another with the same bits."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import warm
from lockstep.cli import cli
from lockstep.kernel.errors import UsageError
from lockstep.portable.variables import OF_TORCH
from lockstep.record.fingerprints import RecordedStep, read_step_fingerprints
from lockstep.record.reader import read_run
from lockstep.tools.replay.record_audit import audit_record
from lockstep.tools.replay.recorded_program import find_base, find_obstacles, read_program
from lockstep.tools.replay.recorded_run import read_recorded_run
from lockstep.tools.replay.result import Replay, ReplayRequest
from replays import run_replay

NET = """
from torch import nn

def build():
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
"""

HEAD = """
import os
import sys
from functools import partial

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

class Noisy(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(64, 6, generator=generator)
        self.targets = torch.randint(0, 4, (64,), generator=generator)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(6), self.targets[index]
"""

TRAIN = """
import network_of_mine

class Meter:
    "A factor of the loss that changes with each epoch."

    value = 1.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]

def main():
    ls.init(timeout=60)
    torch.manual_seed(0)
    meter = Meter()

    def loss(outputs, targets):
        return meter.value * nn.functional.cross_entropy(outputs, targets)

    with ls.Trainer(
        network_of_mine.build(), loss, partial(torch.optim.Adam, lr=0.01),
        microbatches=8, seed=1, autocast_dtype=torch.bfloat16, max_grad_norm=0.5,
        checkpoint=ls.CheckpointConfig(every_steps=3, keep=9, stateful={"meter": meter}),
    ) as trainer:
        for _ in range(3):
            for batch in trainer.batches(Noisy(), 16, num_workers=2):
                trainer.step(batch)
            meter.value *= 1 + trainer.evaluate(Noisy(), 16).loss / 10

if __name__ == "__main__":
    ls.launch(main, nprocs=int(sys.argv[1])) if len(sys.argv) > 1 else main()
"""


def record(folder: Path, *words: str, **files: str) -> Path:
    """Run a script under `lockstep run` in a folder, and return the folder of its run."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    with contextlib.chdir(folder):
        CliRunner().invoke(cli, ["run", *words, "train.py"])
    return folder / "runs" / words[words.index("--name") + 1]


def results(replay: Replay) -> list[RecordedStep]:
    assert not replay.failure, (replay.failure, replay.details)
    return [
        RecordedStep(each.step, each.epoch, each.loss, each.norm, each.losses, each.batch)
        for each in replay.steps
    ]


def replayed(run: Path, first: int, last: int, ranks: int = 1) -> Replay:
    """Replay steps, and require that they are those of the record."""
    replay = run_replay(ReplayRequest(run, first, last, ranks))
    assert results(replay) == read_step_fingerprints(run)[first : last + 1]
    return replay


def test_a_script_on_4_ranks_is_replayed_by_one_and_by_four_without_its_files(
    tmp_path, monkeypatch
):
    project = tmp_path / "project"
    project.mkdir()
    run = record(project, "-n", "4", "--name", "four", train=HEAD + TRAIN, network_of_mine=NET)
    assert len(read_step_fingerprints(run)) == 12
    # As on another machine: only the folder of the run is there, and another module of that name.
    shutil.move(run, tmp_path / "copied")
    run = tmp_path / "copied"
    shutil.rmtree(project)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "network_of_mine.py").write_text("raise RuntimeError('today')")
    # One is saved later where the one before it is being written.
    digests = {int(line["step"]): line["digest"] for line in read_run(run).checkpoints}
    first, second, third, *_ = digests
    alone = replayed(run, third - 1, third)
    assert alone.base == second
    assert alone.steps[0].digest == digests[third]
    assert replayed(run, third - 1, third, 4).steps == alone.steps

    # A checkpoint that is damaged is left out, one that is gone is not missed.
    model = run / "checkpoints" / f"step-{second}" / "model.safetensors"
    model.write_bytes(bytes(len(model.read_bytes())))
    base = find_base(read_run(run), third - 1)
    assert (base.steps, len(base.remarks)) == (first, 1)
    assert "the checksum of model.safetensors differs" in base.remarks[0]
    (run / "checkpoints" / f"step-{first}" / "manifest.json").unlink()
    assert find_base(read_run(run), third - 1).checkpoint is None
    assert replayed(run, first + 1, first + 1).base == 0


CHANGING = """
import rule_of_mine

ls.init(timeout=60)
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 4, (64,)))
with ls.Trainer(
    nn.Linear(6, 4), rule_of_mine.loss, SGD, microbatches=4,
    checkpoint=ls.CheckpointConfig(every_steps=2, keep=9),
) as trainer:
    for batch in trainer.batches(data, 8):
        if trainer.steps == 5 and not os.path.exists("go"):
            trainer._run._checkpoints.writer.wait()
            sys.exit("not yet")
        trainer.step(batch)
"""

RULE = """
from torch.nn import functional as F

def loss(outputs, targets):
    return {factor} * F.cross_entropy(outputs, targets)
"""


def test_a_run_that_was_resumed_with_other_sources_is_replayed_with_those_of_each_step(tmp_path):
    words = ["-n", "2", "--name", "twice"]
    run = record(tmp_path, *words, train=HEAD + CHANGING, rule_of_mine=RULE.format(factor=1))
    assert len(read_step_fingerprints(run)) == 5
    (tmp_path / "go").touch()
    # Of another size, or cached bytecode of the same second would count as that of this file.
    (tmp_path / "rule_of_mine.py").write_text(RULE.format(factor="2.0"))
    with contextlib.chdir(tmp_path):
        assert CliRunner().invoke(cli, ["run", "--resume", "twice"]).exit_code == 0
    assert len(read_step_fingerprints(run)) == 8
    found = read_run(run)
    first = int(found.resumes[0]["step"])  # that of the last checkpoint which was complete
    names = [read_program(found, step).sources.name for step in (first - 1, first)]
    assert names == ["sources", "sources-2"]
    assert replayed(run, first - 1, first - 1).base < first
    assert replayed(run, first, first).base == first
    audit = audit_record(read_recorded_run(run), 1, 7, lambda _: None)
    assert (audit.verdict, audit.steps) == ("same", 7)  # each step with its own sources
    (run / "checkpoints" / f"step-{first}" / "manifest.json").unlink()
    base = find_base(found, first)
    said = find_obstacles(found, first, read_program(found, first), base)
    assert any(f"after step {first}, from a checkpoint that is gone" in each for each in said)


TWO = """
ls.init(timeout=60)
torch.manual_seed(0)
one = ls.Trainer(nn.Linear(6, 6), nn.MSELoss(), SGD, microbatches=4, loggers="runs/one")
two = ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), SGD, microbatches=2, loggers="runs/two")
for number in range(6):
    inputs = torch.randn(16, 6)
    one.step((inputs, inputs.flip(1)))
    if number % 2:
        with two.manual_step() as step:
            for inputs, targets in step.microbatches((inputs, torch.randint(0, 4, (16,)))):
                step.backward(nn.functional.cross_entropy(two.model(one.model(inputs)), targets))
"""


def test_each_of_two_trainers_is_replayed_from_its_own_record(tmp_path):
    record(tmp_path, "-n", "2", "--name", "launch", train=HEAD + TWO)
    assert read_program(read_run(tmp_path / "runs" / "two"), 0).trainer == 1
    replayed(tmp_path / "runs" / "one", 3, 4)
    replayed(tmp_path / "runs" / "two", 2, 2)


PAGE = Path(__file__).parents[3] / "docs/guides/replay.md"


def blocks(page: str) -> dict[str, list[str]]:
    """Return the lines below each command of a page, by the command."""
    shown = [each.splitlines() for each in re.findall(r"```console\n(.*?)```", page, re.DOTALL)]
    return {command.removeprefix("$ "): lines for command, *lines in shown}


def without_numbers(lines: list[str]) -> str:
    """Return lines as one text without what depends on the processor or on the time.

    A checkpoint is saved later where the one before it is being written, and abandoned if a step
    fails meanwhile.
    """
    lines = [line for line in lines if line.strip("─") and not line.startswith("digest")]
    text = " ".join(" ".join(lines).split()).replace("digest of the weights, ", "")
    return re.sub(r"\d\.\d{9,}|from the (checkpoint after \d+ steps|beginning)", "#", text)


def test_the_page_about_replays_does_what_it_says(tmp_path):
    page = PAGE.read_text()
    script = re.findall(r"```python[^\n]*\n(.*?)```", page, re.DOTALL)[0]
    commands = blocks(page)
    launch, replay, alone, debug = (each.split()[1:] for each in commands)
    shown = [without_numbers(each) for each in commands.values()]
    (tmp_path / "train.py").write_text(script)
    with contextlib.chdir(tmp_path):
        outcomes = [CliRunner().invoke(cli, each) for each in (launch, replay, alone)]
        debugged = warm.run(
            [*warm.LOCKSTEP, *debug],
            input="\n".join(re.findall(r"\(Pdb\) (.*)", page)),
            text=True,
            timeout=100,
            env={**os.environ, **OF_TORCH},  # its ranks are forks of the command, which computes
        )
    outputs = [without_numbers(each.output.splitlines()) for each in outcomes]
    assert [each.exit_code for each in outcomes] == [1, 0, 0], outputs
    said, end = shown[0].replace(" .../", " ").split("; ...")[0].rsplit("; ", 1)
    run = tmp_path / "runs" / "night"
    recorded_end = read_run(run).end["message"].replace(f"{tmp_path}/", "")
    assert said.endswith(recorded_end.rpartition("; ")[0].partition(", ")[2])
    assert recorded_end.rpartition("; ")[2] == end
    assert end == "compute it again with: lockstep replay runs/night --step 7 --microbatch 2"
    assert outputs[1:] == shown[1:3]
    assert debugged.returncode == 0, debugged.stderr
    prompts = [line.removeprefix("(Pdb) ") for line in debugged.stdout.splitlines()]
    session = commands[" ".join(["lockstep", *debug])]
    expected = [line for line in session if line and "(Pdb)" not in line]
    assert [line.replace(f"{tmp_path}/", "") for line in prompts[:4]] == expected

    for wrong, message in (
        ([*debug, "-n", "2"], "on one rank: add --microbatch M, omit -n"),
        ([*replay, "--pdb"], "add --microbatch M"),
    ):
        with contextlib.chdir(tmp_path), pytest.raises(UsageError, match=message):
            CliRunner().invoke(cli, wrong, catch_exceptions=False)


def run_program(folder: Path, *words: str, **variables: str) -> None:
    outcome = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr


OF_VARIABLES = """
ls.init(timeout=60)
rate = float(os.environ["MADE_UP_RATE"]) * float(os.environ.get("MADE_UP_FACTOR", "1"))
with ls.Trainer(nn.Linear(6, 4), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=rate)) as it:
    for batch in it.batches(Noisy(), 16):
        it.step(batch)
"""


def test_variables_that_a_script_reads_are_those_of_the_recorded_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MADE_UP_RATE", "0.5")
    run = record(tmp_path, "--name", "mine", train=HEAD + OF_VARIABLES)
    assert read_program(read_run(run), 0).variables == {"MADE_UP_RATE": "0.5"}
    monkeypatch.setenv("MADE_UP_RATE", "0.25")
    monkeypatch.setenv("MADE_UP_FACTOR", "3")
    replayed(run, 2, 3)  # and with the same weights, though the script does not seed torch


OF_A_LOOP = """
def main():
    ls.init(timeout=60)
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = ls.exact(model, 4)
    data = Noisy()
    for inputs, targets in torch.utils.data.DataLoader(data, batch_sampler=exact.sampler(data, 32)):
        exact.begin()
        exact.weigh(nn.functional.cross_entropy(model(inputs), targets)).backward()
        if exact.is_complete:
            optimizer.step()
            optimizer.zero_grad()

main()
"""


def test_the_last_step_of_a_loop_is_replayed_though_nothing_follows_it(tmp_path):
    """It is committed when the program ends, as those of Accelerate and transformers are."""
    run = record(tmp_path, "--name", "mine", train=HEAD + OF_A_LOOP)
    replayed(run, 1, 1)


@pytest.mark.stress
@pytest.mark.parametrize(
    ("words", "kind", "ranks"),
    [
        (("train.py",), "script", 2),
        (("-m", "train"), "module", 2),
        (("train.py", "2"), "function", 1),
        (("-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"), "script", 1),
    ],
)
def test_programs_that_python_and_torchrun_start(tmp_path, words, kind, ranks):
    (tmp_path / "train.py").write_text(HEAD + TRAIN)
    (tmp_path / "network_of_mine.py").write_text(NET)
    run_program(tmp_path, *words)
    (run,) = (tmp_path / "runs").iterdir()
    assert read_program(read_run(run), 0).kind == kind
    replayed(run, 7, 7, ranks)


@pytest.mark.stress
def test_recorded_variables_are_used(tmp_path):
    for name, text in (("train", HEAD + TRAIN), ("network_of_mine", NET)):
        (tmp_path / f"{name}.py").write_text(text)
    words = ("-m", "lockstep", "run", "-n", "2", "--name", "mine", "train.py")
    run_program(tmp_path, *words, ATEN_CPU_CAPABILITY="default", OMP_NUM_THREADS="2")
    run = tmp_path / "runs" / "mine"
    program = read_program(read_run(run), 1)
    assert program.environ["ATEN_CPU_CAPABILITY"] == "default"
    assert program.environ["OMP_NUM_THREADS"] == "2"
    before = dict(os.environ)
    replayed(run, 1, 2)
    assert dict(os.environ) == before
    record = run / "record.jsonl"
    record.write_text(record.read_text().replace('"ATEN_CPU_CAPABILITY":"default"', '"X":"1"'))
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":  # other kernels, other bits
        without = run_replay(ReplayRequest(run, 1, 2))
        assert results(without) != read_step_fingerprints(run)[1:3]
