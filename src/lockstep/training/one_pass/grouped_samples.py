"""The requests of a script's loop over samples to passes (`script_passes.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.step_context import StepContext
from lockstep.training.one_pass.grouped_passes import PassResults

__all__ = ["GroupedSamples", "SamplePass", "average"]


class SamplePass(Protocol):
    """A pass over several micro-batches, whose forward and losses the script computes.

    Attributes:
        data: The samples.
        size: Their number.
        is_begun: Whether the script has to compute the pass.
    """

    data: Any
    size: int
    is_begun: bool

    def backward(self, losses: torch.Tensor) -> None:
        """End the forward pass, and compute the gradients from one loss per sample."""

    def end(self, logged: Mapping[str, torch.Tensor]) -> None:
        """End the pass, with a value of each sample by name."""


class GroupedSamples(Protocol):
    """Computes several micro-batches of a script's loop together, in attempts that may fail."""

    def divide(self, step: StepContext, batch: Batch) -> list[Sequence[Microbatch]]:
        """Return the groups of a step, in order."""

    def open(self, step: StepContext, buffers: Buffers, group: Sequence[Microbatch]) -> Any:
        """Return an attempt that has the bits of separate passes; None: it is not known."""

    def close(self, attempt: Any) -> PassResults | None:
        """Return the results of an attempt; None: its micro-batches are computed one by one."""

    def begin_trial(self, step: StepContext, buffers: Buffers, group: Sequence[Microbatch]) -> Any:
        """Return what compares separate passes with an attempt; None: it is not due."""

    def begin_pass(self, attempt: Any) -> SamplePass:
        """Begin an attempt."""

    def count(self, group: Sequence[Microbatch]) -> None:
        """Count a step in which the micro-batches were compared, or computed together."""


def average(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over some samples, with the same bits at any address."""
    copy = values.detach().clone()
    return (copy if copy.is_floating_point() else copy.float()).mean()
