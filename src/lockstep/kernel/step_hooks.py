"""Hooks: the features that take part in a step without being part of every step.

    step            hook                                  example: a checkpoint is due
    compute         begin(step, batch), a context
    exchange        status(step)      on every rank       [True] on rank 0, [False] elsewhere
                    merge(left, right)                    the value of the lowest rank
    check           check(step, merged), may raise
    update, commit  commit(step)
    afterwards      report(committed)                     saved at the next safe point
    or repeated     undo()

What the hooks of all ranks have to tell each other travels in the one exchange of the step. A step
calls those methods that a hook overrides, of hooks that take part in it; without hooks, none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lockstep.kernel.rank_status import StatusSummary
from lockstep.kernel.step_context import StepContext

__all__ = ["CommittedStep", "RepeatStep", "StepHook", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step.

    Attributes:
        step: The number of the step, from 0.
        epoch: The epoch, from 0.
        loss: The loss of the batch before the step; NaN in a loop with `ls.exact` that calls
            `backward` on losses that it has not weighed.
        samples: The number of samples of the batch.
        metrics: The means of the metrics over the samples of the batch.
        lr: The learning rate of the step.
        seconds: The duration of the step, in seconds.
        ranks: [compute, communication, waiting, data] of the first 64 ranks, in seconds.
        outside: The seconds of these ranks between the previous step and this one, without those
            of loading data and of waiting for other ranks: in the body of the loop, callbacks,
            evaluation and saving. 0 if the previous step is not known.
        norm: The 2-norm of the whole gradient before clipping.
        loss_scale: The scale of the loss; None without float16 autocast.
        is_skipped: Whether gradients overflowed, so that the weights did not change; None without
            float16 autocast.
        losses: The losses of the micro-batches; None for a micro-batch of weight 0, which is not
            computed, and for a loss that is not known. Empty if there are more than 64 ranks.
        batch: A hash of the batch's sample indices, or of its content if it does not come from
            `trainer.batches`; None if neither is known.
    """

    step: int
    epoch: int
    loss: float
    samples: int
    metrics: dict[str, float]
    lr: float
    seconds: float = 0.0
    ranks: list[list[float]] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    norm: float = 0.0
    loss_scale: float | None = None
    is_skipped: bool | None = None
    losses: list[float | None] = field(default_factory=list)
    batch: str | None = None


@dataclass
class CommittedStep:
    """A finished step.

    Attributes:
        step: The context of the step.
        summary: The summary of the statuses of all ranks.
        result: The result of the step.
        is_manual: Whether the micro-batches were computed in the user's script.
    """

    step: StepContext
    summary: StatusSummary
    result: StepResult
    is_manual: bool = False


class RepeatStep(Exception):
    """Every rank undoes the current attempt and computes the step again."""


class StepHook:
    """A feature that takes part in the steps of a trainer; the methods of this class do nothing.

    Attributes:
        name: The key of the hook's value in a status.
        first: The number of first steps in which the hook takes part.
        every: It also takes part in each multiple of this step.
        is_outermost: Whether the context of `begin` is left after the executor is closed.
        events: The names of the methods that the class overrides.
    """

    name: ClassVar[str] = ""
    first: int = 0
    every: int = 1
    is_outermost: ClassVar[bool] = False
    events: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        """Find the methods that the class overrides."""
        super().__init_subclass__()
        cls.events = frozenset(
            name
            for name, method in vars(StepHook).items()
            if callable(method) and not name.startswith("_") and getattr(cls, name) is not method
        )

    def begin(self, step: StepContext, batch: Any) -> AbstractContextManager[object] | None:
        """Take part in a step that begins.

        Args:
            step: The context of the step.
            batch: The batch; None if the user's script computes the micro-batches.

        Returns:
            The context in which the micro-batches are computed; None if none is needed.
        """

    def status(self, step: StepContext) -> Any:
        """Return this rank's value for all ranks, which JSON can express."""

    def decode(self, value: Any) -> Any:
        """Return the value for `merge` and `check` from its JSON, which has lists for tuples."""
        return value

    def merge(self, left: Any, right: Any) -> Any:
        """Return the value of two contiguous ranges of ranks; associative."""
        return left

    def check(self, step: StepContext, summary: StatusSummary) -> None:
        """Raise, on every rank, the error that prevents the step, if there is one.

        Args:
            step: The context of the step.
            summary: The summary of all ranks, with their merged value. If it has a failure, that
                is raised after the checks of all hooks.
        """

    def commit(self, step: StepContext) -> None:
        """Make the effects of a step permanent, which is local."""

    def measure(self, step: StepContext, value: Any) -> Mapping[str, Any]:
        """Return fields of the `StepResult` that the hook has measured.

        Args:
            step: The context of the step.
            value: The merged value of all ranks.
        """
        return {}

    def report(self, committed: CommittedStep) -> None:
        """Handle a step that is committed and counted."""

    def undo(self) -> None:
        """Undo the effects of a step that is repeated."""
