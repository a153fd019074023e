"""Weights of micro-batches that a script's loop gives with their losses, such as numbers of tokens.

They are known only when each loss has been computed. Every micro-batch therefore contributes its
loss times its weight, and the sums over the whole batch are divided by the sum of all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.kernel.errors import UsageError
from lockstep.kernel.rank_status import StatusSummary
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import StepHook
from lockstep.model.forward import require_number
from lockstep.training.microbatch_loop import MicrobatchLoop

__all__ = ["GivenWeights", "read_number"]

Weights = list[tuple[int, float]]
"""The micro-batches and their weights."""

SCALED = -1
"""Stands among the micro-batches for losses that are scaled, which all ranks have to know."""


def read_number(loop: MicrobatchLoop, argument: str, value: Any) -> float:
    """Return an argument of a loop as a float; UsageError if it is not one number."""
    require_number(f"{loop.place}: {argument}", value)
    return float(value)


class GivenWeights(StepHook):
    """The hook that adds the weights of all micro-batches.

    Attributes:
        given: The weights of this rank's micro-batches in the current step.
        total: The sum of all weights, on every rank; None if no micro-batch has one.
    """

    name = "weights"

    def __init__(self) -> None:
        self.given: dict[int, float] = {}
        self.total: float | None = None
        self._number = -1  # of the current step

    def begin(self, step: StepContext, batch: Any) -> None:
        """Forget the weights of the last step, but not those of an earlier attempt at this one."""
        if step.number != self._number:
            self.given = {}
        self._number = step.number
        self.total = None

    def status(self, step: StepContext) -> Weights:
        """Return the weights of this rank."""
        scaled = [(SCALED, 1.0)] if step.may_overflow else []
        return [*self.given.items(), *scaled]

    def decode(self, value: Sequence[Sequence[Any]]) -> Weights:
        """Return the weights from their JSON."""
        return [(index, weight) for index, weight in value]

    def merge(self, left: Weights, right: Weights) -> Weights:
        """Return the weights of two ranges of ranks."""
        return left + right

    def check(self, step: StepContext, summary: StatusSummary) -> None:
        """Add the weights in the order of the micro-batches, and note whether losses are scaled.

        Raises:
            UsageError: Some micro-batches have no weight, or the sum is 0.
        """
        known: Weights = sorted(summary.hooks[self.name])
        # A rank without a micro-batch has scaled none.
        while known and known[0][0] == SCALED:
            step.may_overflow = True
            known.pop(0)
        if summary.failure is not None or not known:
            return
        total = sum(weight for _, weight in known)
        if len(known) < summary.leaves or not total > 0:
            raise UsageError(
                f"step {step.number}: {len(known)} of {summary.leaves} micro-batches have a "
                f"weight, with a sum of {total:g}: pass weight= for each, and not 0 for all of them"
            )
        self.total = total
