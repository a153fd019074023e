"""What ranks tell each other about the run in every step: checkpoints, stops, joins."""

from __future__ import annotations

from typing import Any

from lockstep.elastic.membership import Membership
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import CommittedStep, StepHook
from lockstep.training.run_checkpoints import RunCheckpoints
from lockstep.training.safe_points import SafePoints

__all__ = ["CheckpointRequests", "JoinRequests", "ManualStepLog"]


class CheckpointRequests(StepHook):
    """The hook by which rank 0 requests checkpoints, and any rank asked to stop is heard.

    Args:
        checkpoints: The checkpoints of the run.
        safe_points: The next safe point saves them.
    """

    name = "checkpoint"

    def __init__(self, checkpoints: RunCheckpoints, safe_points: SafePoints) -> None:
        self._checkpoints, self._safe_points = checkpoints, safe_points
        self._is_due = False

    def begin(self, step: StepContext, batch: Any) -> None:
        """Decide whether this rank wants a checkpoint after the step."""
        self._is_due = self._checkpoints.is_due_after(step.number + 1)

    def status(self, step: StepContext) -> tuple[bool, str]:
        """Return whether a checkpoint is due, and the signal that asked this rank to stop."""
        return self._is_due, self._checkpoints.stop.signal

    def merge(self, left: tuple[bool, str], right: tuple[bool, str]) -> tuple[bool, str]:
        """Return what the lowest rank wants, and the first signal."""
        return left[0], left[1] or right[1]

    def report(self, committed: CommittedStep) -> None:
        """Let the run save a checkpoint, or stop, at the next safe point."""
        is_due, signal = committed.summary.hooks[self.name]
        self._checkpoints.note_step(is_due, signal, committed.step.number + 1)
        self._safe_points.report_saved()


class JoinRequests(StepHook):
    """The hook of an elastic run by which rank 0 reports that members wait to join or leave.

    Args:
        member: This process.
        safe_points: The next safe point lets them.
    """

    name = "join_round"

    def __init__(self, member: Membership, safe_points: SafePoints) -> None:
        self._member, self._safe_points = member, safe_points
        self._round = -1

    def begin(self, step: StepContext, batch: Any) -> None:
        """Ask the launcher for newcomers, on rank 0."""
        is_asked = step.parallel.rank == 0 and self._member.poll()
        self._round = self._member.round if is_asked else -1

    def status(self, step: StepContext) -> int:
        """Return the round at whose end members join or leave; -1 for none."""
        return self._round

    def report(self, committed: CommittedStep) -> None:
        """Let the round end at the next safe point."""
        self._safe_points.ending_round = committed.summary.hooks[self.name]


class ManualStepLog(StepHook):
    """The hook that logs manual steps, so that a resumed script does not repeat them unnoticed."""

    def __init__(self, safe_points: SafePoints) -> None:
        self._safe_points = safe_points

    def report(self, committed: CommittedStep) -> None:
        """Log a manual step."""
        if committed.is_manual:
            self._safe_points.note_manual_step()
