"""The check that a step begins on the whole state of an optimizer that all ranks share."""

from __future__ import annotations

from typing import Any

from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import StepHook
from lockstep.model.held_parameters import HeldParameters
from lockstep.training.storage.shared_optimizer import SharedOptimizer

__all__ = ["SharedStateCheck"]


class SharedStateCheck(StepHook):
    """The hook that begins a step only on a whole state.

    Args:
        optimizer: The optimizer of the shared parameters.
        held: What the trainer holds, which a loaded state replaces.
    """

    def __init__(self, optimizer: SharedOptimizer, held: HeldParameters) -> None:
        self._optimizer = optimizer
        self._held = held

    def begin(self, step: StepContext, batch: Any) -> None:
        """Publish the script's changes of the state, and require that it is whole.

        Raises:
            WorkError: Parameters and optimizer state are not those of a single step.
            UsageError: A change of the state cannot be published.
        """
        self._optimizer.shared.require_whole()
        self._optimizer.publish_edits()
        if self._optimizer.was_loaded:
            self._held.commit()
            self._optimizer.was_loaded = False

    def commit(self, step: StepContext) -> None:
        """Note the parameters after the update, which all ranks can write."""
        self._held.commit()
