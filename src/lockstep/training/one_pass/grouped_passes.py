"""The requests of a step to passes over several micro-batches (`lockstep.training.one_pass`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.step_context import StepContext

__all__ = ["GroupedPasses", "PassResults", "PassTrial"]


class PassResults(NamedTuple):
    """The results of a pass, whose gradients are in `.grad`.

    Attributes:
        losses: The losses of the micro-batches, detached.
        metrics: Their metrics.
        buffers: The buffers after each of them.
    """

    losses: list[torch.Tensor]
    metrics: list[dict[str, Any]]
    buffers: list[list[torch.Tensor]]


class PassTrial(Protocol):
    """The results of separate passes, with which those of one pass are compared."""

    def note(
        self,
        loss: torch.Tensor,
        parameters: Sequence[nn.Parameter],
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the loss of a micro-batch, its gradients, which are in `.grad`, and metrics."""

    def finish(self) -> None:
        """Compare all bits, after the last micro-batch."""


class GroupedPasses(Protocol):
    """Computes the micro-batches of a rank in groups."""

    def divide(self, step: StepContext, batch: Batch) -> list[Sequence[Microbatch]]:
        """Return the groups of a step, in order."""

    def compute(
        self, step: StepContext, buffers: Buffers, group: Sequence[Microbatch]
    ) -> PassResults | None:
        """Compute a group in one pass; None: its micro-batches are computed one by one."""

    def begin_trial(
        self, step: StepContext, buffers: Buffers, group: Sequence[Microbatch]
    ) -> PassTrial | None:
        """Return the trial of a group that is computed one by one; None: there is none."""
