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
from lockstep.tools.replay.replay_session import ReplaySession
from lockstep.tools.replay.result import ReplayedStep, ReplayRequest
from lockstep.tools.replay.single_microbatch import DebuggerLeft
from lockstep.training.session import SessionComplete, open_session

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
    session = ReplaySession(request, (None, 0), None, steps.append)
    with open_session(session), pytest.raises(end):
        train(samples)
    return steps[0] if steps else ReplayedStep(0, 0, math.nan, math.nan, (), None, "")


def test_the_samples_of_a_micro_batch_are_known():
    samples = replayed(SAMPLES).samples
    assert samples is not None
    assert len(set(samples)) == 6


def test_the_debugger_stops_in_forward_and_can_be_left(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    replayed(SAMPLES, DebuggerLeft, debug=True)
    printed = capsys.readouterr()
    assert "micro-batch 1 has the samples " in printed.err
    (frame,) = [line for line in printed.out.splitlines() if line.startswith("> ")]
    assert Path(__file__).name in frame
    assert "forward()" in frame
