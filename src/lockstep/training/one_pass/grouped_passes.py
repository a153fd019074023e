"""The requests of a step to passes over several micro-batches (`lockstep.training.one_pass`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.tree import Node

__all__ = ["GroupedPasses", "HashNode", "PassResults", "PassTrial"]

HashNode = Callable[[Node], Mapping[torch.Tensor, int]]
"""Returns the checksums of a node's gradients by parameter, the last of which are in `.grad`."""


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

    def note(self, loss: torch.Tensor, metrics: Mapping[str, Any], hash_node: HashNode) -> None:
        """Keep the loss of a micro-batch and metrics, and after the last one the gradients."""

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
