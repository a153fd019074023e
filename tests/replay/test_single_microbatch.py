"""One micro-batch alone, in this process: what is found in it, and which samples it has."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.tools.replay.recorded_program import Base
from lockstep.tools.replay.replay_session import ReplaySession
from lockstep.tools.replay.result import ReplayedStep, ReplayRequest
from lockstep.tools.replay.single_microbatch import DebuggerLeft
from lockstep.training.trainer_hooks import SessionComplete, open_session

pytestmark = pytest.mark.usefixtures("world_of_one")
SAMPLES = TensorDataset(torch.linspace(-1, 1, 144).reshape(24, 6), torch.arange(24) % 4)


class Halved(nn.Sequential):
    """A model with a forward of its own."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return super().forward(values) / 2


def train(samples: TensorDataset) -> None:
    torch.manual_seed(0)
    trainer = ls.Trainer(
        Halved(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        microbatches=2,
        loggers=None,
    )
    for batch in trainer.batches(samples, 12):
        trainer.step(batch)


def replayed(samples: TensorDataset, end: Any = SessionComplete, **options: Any) -> ReplayedStep:
    """Return the second micro-batch of the first step, of six samples."""
    steps: list[ReplayedStep] = []
    request = ReplayRequest(Path("runs/mine"), 0, 0, microbatch=1, **options)
    session = ReplaySession(request, (None, 0), Base(), steps.append)
    with open_session(session), pytest.raises(end):
        train(samples)
    return steps[0] if steps else ReplayedStep(0, 0, math.nan, math.nan, (), None, "")


def test_the_first_module_with_a_value_that_is_not_finite_is_named():
    samples = replayed(SAMPLES).samples
    assert samples is not None
    assert len(set(samples)) == 6
    inputs = SAMPLES.tensors[0].clone()
    inputs[samples[2], 5] = math.nan
    found = replayed(TensorDataset(inputs, SAMPLES.tensors[1]), anomaly=True)
    assert found.samples == samples
    first, second = found.remarks
    assert first == (
        "In forward, 0 (Linear) returned the first non-finite values, from inputs that are "
        "non-finite, too"
    )
    assert second.startswith("In backward, Function ")


def test_of_a_finite_micro_batch_it_is_said():
    found = replayed(SAMPLES, anomaly=True)
    assert found.remarks == ("No module returned a non-finite value, and no gradient is NaN",)


def test_the_debugger_shows_frames_of_the_user_and_can_be_left(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("w\nq\n"))
    replayed(SAMPLES, DebuggerLeft, debug=True)
    printed = capsys.readouterr()
    assert "micro-batch 1 has the samples " in printed.err
    frames = [line for line in printed.out.splitlines() if line.startswith(("  /", "> "))]
    assert Path(__file__).name in frames[-1]
    assert "forward()" in frames[-1]
    assert any("trainer.step(batch)" in line for line in printed.out.splitlines())
    assert not any("/torch/" in line or "/src/lockstep/" in line for line in frames)
