"""`lockstep plan`: what it measures in a script, what it prints, and every way it can end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner

from lockstep.cli import cli
from lockstep.kernel.errors import UsageError
from lockstep.tools.commands.plan import _print as print_plans
from lockstep.tools.plan.memory_plan import TrainingMemory, plan_storages
from lockstep.tools.report import terminal

HEAD = """
import sys
from functools import partial

import torch
from torch import nn

import lockstep as ls

ls.init(timeout=60)
optimizer = partial(torch.optim.Adam, lr=0.1)
"""

TRAIN = """
class Wide(nn.Module):
    def forward(self, x):
        return x.repeat(1, 1_000_000).tanh().sum(1, keepdim=True)

model = nn.Sequential(nn.Linear(3, 4), Wide(), nn.Linear(1, 2))
model[0].weight.requires_grad_(False)
trainer = ls.Trainer(model, nn.CrossEntropyLoss(), optimizer, storage="shared")
for step in range(int(sys.argv[1])):
    trainer.step((torch.randn(8, 3), torch.randint(0, 2, (8,))))
    print("step", step)
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Plan a script in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(source, *arguments, catch=False):
        Path("train.py").write_text(HEAD + source)
        words = ["plan", *arguments[:-1], "train.py", *arguments[-1:]]
        return CliRunner().invoke(cli, words, catch_exceptions=catch)

    return run


def test_a_script_that_would_go_on_for_ever(plan, monkeypatch):
    result = plan(TRAIN, "--hosts", "2", "--ranks", "4", "--json", "1000000")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    measured = found["measured"]
    assert measured["parameters"] == 4 * (12 + 4 + 2 + 2)
    assert measured["gradients"] == 4 * (4 + 2 + 2)
    assert 2 * measured["gradients"] <= measured["optimizer"] <= 2 * measured["gradients"] + 64
    assert measured["leaves"] == 8
    assert measured["blocks"] == [4 * 16, 0, 4 * 4]
    assert measured["refusals"] == {}
    assert measured["outputs"] == [4 * 4, 4, 4 * 2]
    # The 4 M numbers after tanh, and as many before it or gradients.
    assert 2 * 16_000_000 <= measured["activations"] < 3 * 16_000_000
    assert 0 <= measured["unused"] < 700_000_000
    assert measured["process"] > 10_000_000
    replicated, shared, _, sharded, stages = found["storages"]
    assert found["choice"] == replicated["argument"] == 'storage="replicated"'
    assert replicated["fits"]
    assert replicated["network"] == measured["gradients"]
    assert (shared["fits"], shared["refusal"]) == (False, "all ranks must be on one host")
    assert sharded["fits"]
    assert len(stages["balance"]) == 2
    assert found["host_memory_bytes"] == psutil.virtual_memory().total
    assert "lockstep run -n 2 --nnodes 2 train.py 1000000" in result.stderr


def test_a_model_that_does_not_fit_is_not_built(plan):
    source = """
def build(inputs, outputs):
    assert torch.empty(0).is_meta
    return nn.Linear(inputs, outputs, bias=False)

blocks = [partial(build, 1_000_000, 1_000_000), partial(build, 1_000_000, 4)]
data = torch.utils.data.TensorDataset(torch.zeros(16, 1), torch.zeros(16, dtype=torch.int64))
trainer = ls.Trainer(blocks, nn.CrossEntropyLoss(), optimizer, microbatches=4)
for inputs, targets in trainer.batches(data, 16):
    trainer.step((inputs.expand(16, 1_000_000), targets))
"""
    result = plan(source, "--ranks", "4", "--json", "--", "")
    assert result.exit_code == 1, result.output
    measured = json.loads(result.stdout.splitlines()[-1])["measured"]
    assert measured["is_computed"]
    assert measured["blocks"] == [4 * 10**12, 16 * 10**6]
    assert measured["parameters"] == measured["gradients"] == sum(measured["blocks"])
    assert 0 <= measured["optimizer"] - 2 * measured["gradients"] < 64
    assert measured["outputs"] == [4 * 4 * 10**6, 4 * 4 * 4]
    assert "a step was computed without memory" in result.stderr
    assert "No storage fits: the smallest, " in result.stderr


def test_a_host_that_is_too_small(plan, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1_000_000))
    result = plan(TRAIN, "--ranks", "2", "9")
    assert result.exit_code == 1
    assert result.output.count("too large") == 4
    assert "No storage fits: the smallest, " in result.output
    assert "a host has 1.00 MB" in result.output


def test_a_script_that_ends_too_early(plan):
    with pytest.raises(UsageError, match=r"had taken enough steps"):
        plan(TRAIN, "2")


def test_a_script_that_fails(plan):
    with pytest.raises(UsageError, match=r"on one rank: rank 0 raised ValueError: no data"):
        plan('raise ValueError("no data")', "3")


def test_a_loop_with_exact(plan):
    source = """
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
optimizer = optimizer(model.parameters())
exact = ls.exact(model, optimizer, microbatches=4)
data = torch.utils.data.TensorDataset(torch.randn(16, 3), torch.randint(0, 2, (16,)))
for epoch in range(int(sys.argv[1])):
    for batch in exact.batches(data, 16, epoch=epoch):
        for inputs, targets in batch:
            batch.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    print("epoch", epoch)
"""
    result = plan(source, "--ranks", "2", "--json", "1000000")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    measured = found["measured"]
    assert measured["is_exact"]
    assert measured["parameters"] == measured["gradients"] == 4 * (16 + 8 + 10)
    assert 0 <= measured["optimizer"] - 2 * measured["gradients"] < 64
    assert measured["leaves"] == 4
    assert measured["outputs"] == [4 * 4 * 4, 4 * 4 * 4, 4 * 4 * 2]
    assert found["choice"] == 'storage="replicated"'
    start = "Start: lockstep run -n 2 train.py 1000000"
    assert f"The loop of ls.exact fits as it is. {start}" in result.stderr
    with pytest.raises(
        UsageError, match=r"let ls\.Trainer, or the loop of ls\.exact, take 3 steps"
    ):
        plan(source, "2")


def test_ranks_that_are_not_a_multiple_of_the_hosts(plan):
    result = plan(TRAIN, "--hosts", "2", "--ranks", "3", "9")
    assert result.exit_code == 2
    assert "3 ranks are not a multiple of 2 hosts" in result.output


@pytest.mark.parametrize("columns", [80, 120])
def test_a_narrow_terminal_shows_whole_numbers(columns, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "terminal_width", lambda: columns)
    memory = TrainingMemory(*[123_456_789] * 7, leaves=8, blocks=(1, 2), outputs=(1, 2))
    print_plans(plan_storages(memory, 1, 2), None, 10**12)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert max(map(len, lines)) <= columns
    names = re.split(r"  +", lines[0].strip())
    assert {"per rank", "per host", "verdict"} <= set(names)
    assert [len(re.split(r"  +", line.strip())) for line in lines[2:6]] == [len(names)] * 4
