"""The parts that a step combines: an executor, sums of gradients, an update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.kernel.buffers import Buffers
from lockstep.kernel.step_context import StepContext

__all__ = ["Executor", "GradientSums", "Part", "SharedUpdate", "StepLoop", "Update"]


class GradientSums(Protocol):
    """The sums of the gradients of a part of the model, along the tree."""

    def used_parameter_mask(self) -> str:
        """Return, as a hex number, a mask whose bit n is set if parameter n has a gradient here."""

    def pack(self) -> bytes:
        """Return this rank's sums if they are sent with the status; the same on every rank."""

    def reduce(self, mask: str, messages: Sequence[bytes]) -> None:
        """Add the sums of all ranks, in `.grad`.

        Args:
            mask: The parameters that have a gradient on some rank.
            messages: The messages of all ranks, with the results of `pack`.
        """

    def clear(self) -> None:
        """Empty `.grad` of every parameter, and discard the sums."""


Part = tuple[GradientSums, Buffers]
"""The gradients and the buffers of a part of the model: the whole model, or a stage."""


class StepLoop(Protocol):
    """The computation of one step, which a script may control instead."""

    def compute(self, batch: Any) -> None:
        """Compute this rank's part of a batch."""


class Executor(Protocol):
    """The interface of executors, which compute micro-batches: on a whole model, or in stages."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that this rank updates."""

    @property
    def owned_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that this rank counts in the norm of the gradient."""

    def open(self, step: StepContext) -> AbstractContextManager[StepLoop]:
        """Return the context in which a step is computed; it yields a `StepLoop`."""

    @property
    def parts(self) -> Sequence[Part]:
        """The gradients and buffers of each part of the model on this rank, in the current step."""

    def broadcast_tied_gradients(self, attempt: int) -> None:
        """Send the gradient sums of tied parameters to all stages that have them."""

    def reset(self) -> None:
        """Prepare for another attempt after a failed one."""


class SharedUpdate(Protocol):
    """The update of parameters that all ranks share, each of which steps a part."""

    is_committed: bool
    """Whether the last step was committed, so that it cannot be undone."""

    def local_gradients(self) -> Sequence[torch.Tensor]:
        """Return the sums of the gradients of this rank's part."""


class Update(Protocol):
    """The optimizers, their schedulers, and the average of the weights."""

    @property
    def rate(self) -> float:
        """The learning rate of the first parameter group."""

    @property
    def shared(self) -> SharedUpdate | None:
        """The update of parameters that all ranks share; None if each rank has its own."""

    def step_shared(self, about: str) -> None:
        """Update the parameters that all ranks share: a collective call.

        Args:
            about: The operation that the call is part of, for messages.
        """

    def step(self) -> None:
        """Update what this rank has alone."""
