"""Hooks that give every step the same environment: threads, kernels, no calls between ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.kernel.step_context import Position, StepContext
from lockstep.kernel.step_hooks import StepHook
from lockstep.launcher.device_choice import require_deterministic
from lockstep.model.collective_calls import CollectiveCallGuard
from lockstep.model.static_shapes import static_shapes

__all__ = ["CollectiveCallCheck", "KernelSettings"]


class KernelSettings(StepHook):
    """The hook that restores the number of threads, and lets graphs depend on shapes only.

    Args:
        model: The model, or its compiled wrapper.
    """

    # Leaving autocast, which the executor does, restores the setting of its cache from before.
    is_outermost = True

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def begin(self, step: StepContext, batch: Any) -> AbstractContextManager[None]:
        """Set what kernels depend on."""
        require_deterministic(step.parallel.device)
        if torch.get_num_threads() != step.parallel.threads:
            torch.set_num_threads(step.parallel.threads)
        return static_shapes(self._model)


class CollectiveCallCheck(StepHook):
    """The hook that refuses collective calls of the script while micro-batches are computed.

    Args:
        position: A function that returns the micro-batch and the stage that are being computed.
    """

    def __init__(self, position: Position) -> None:
        self._position = position

    def begin(self, step: StepContext, batch: Any) -> CollectiveCallGuard:
        """Return the context in which such calls raise UsageError."""
        return CollectiveCallGuard(partial(self._find_place, step))

    def _find_place(self, step: StepContext) -> str:
        """Return the place of the micro-batch that is being computed; "" between them."""
        position = self._position()
        return "" if position is None else step.place(position[0])
