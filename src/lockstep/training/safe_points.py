"""The position of a script, and the safe points at which it is saved.

    resumed script │ calls of the journal are answered │ the state is restored │ calls have effects

A position is the calls that the script has completed, and the state of its training. It is loaded
from a checkpoint, or received from another rank, and restored at the call where the interrupted
script was.

Safe points are where a script can be continued: between two batches of its outermost loop, and
after a call outside of any loop over batches.

    at a safe point     a checkpoint is saved if one is due, or if a rank was asked to stop
                        members of an elastic run join and leave

Three hooks tell all ranks in every step what is to be done at the next safe point.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch.distributed as dist

from lockstep.checkpoint.folder import refusing_misfits
from lockstep.checkpoint.stop_request import StoppedOnRequest
from lockstep.checkpoint.writer import SavedCheckpoint
from lockstep.elastic.membership import Membership
from lockstep.kernel.errors import FileError, UsageError, WorkError
from lockstep.kernel.step_context import Attempt, StepContext
from lockstep.kernel.step_hooks import CommittedStep, StepHook
from lockstep.launcher.rank_process import report_to_launcher
from lockstep.messages import log
from lockstep.training.call_journal import CallJournal, OpenEpoch
from lockstep.training.compatibility import (
    describe_training,
    find_differences,
    require_same_training,
)
from lockstep.training.history import History
from lockstep.training.run_checkpoints import RunCheckpoints
from lockstep.training.state import TrainingState

__all__ = ["CheckpointRequests", "JoinRequests", "ManualStepLog", "SafePoints", "ScriptPosition"]


class ScriptPosition:
    """The position of the script of one trainer.

    Args:
        state: The state of the training.
        history: The history, to which the line of a round is written.
        settings: The description of model, optimizer and arguments.
        checkpoints: The checkpoints of the run; None for a trainer without them.

    Attributes:
        log: The calls of the script.
        has_joined: Whether this process has joined a running elastic run.
        resumed_from: The number of steps that the training was resumed after; None if it was not.
        saved: The steps and the size of the log in the latest checkpoint.
        restore_objects: The function that restores registered objects and generators; None: the
            checkpoints do.
        round_line: The fields of the record's line of a round, which is written after the state is
            restored.
    """

    def __init__(
        self,
        state: TrainingState,
        history: History,
        settings: Mapping[str, str],
        checkpoints: RunCheckpoints | None,
    ) -> None:
        self.state, self._history, self._settings = state, history, settings
        self._checkpoints = checkpoints
        self.log = CallJournal()
        self.has_joined = False
        self.resumed_from: int | None = None
        self.saved = (-1, -1)
        self.restore_objects: Callable[[Mapping[str, Any]], None] | None = None
        self.round_line: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = None  # until the script reaches it

    @cached_property
    def training(self) -> dict[str, Any]:
        """The description of the training, which a checkpoint must match."""
        return describe_training(self._settings)

    @property
    def steps(self) -> int:
        """The number of finished steps."""
        return self.state.position.steps

    @property
    def current(self) -> tuple[int, int]:
        """The steps and the size of the log now."""
        return self.steps, self.log.size

    @property
    def is_replaying(self) -> bool:
        """Whether the script has not yet reached the position of the interrupted one."""
        return self._restored is not None

    def is_inside(self, epoch: OpenEpoch | None) -> bool:
        """Return whether the script is in the body of a loop over batches other than `epoch`."""
        return self.log.is_inside_epoch if epoch is None else not self.log.is_outermost(epoch)

    def load(self, state: dict[str, Any]) -> list[str]:
        """Load a checkpoint's state and its log of calls; return the differences as sentences."""
        here = self.state.position_state() | self.training
        require_same_training(state, here)
        with refusing_misfits("the state of the checkpoint"):
            self.log.load_state_dict(state["script"])
            self.state.load_local(state)
        self._restored = state
        return find_differences(state, here, self.state.describe_optimization())

    def continue_from_here(self) -> None:
        """Restore the state, if the script has repeated every call of the interrupted one."""
        if not self.log.is_replaying:
            self.restore()

    def note_answer(self, steps: int) -> None:
        """Note that a call was answered, after which `steps` steps were finished."""
        self.state.position.steps = steps
        self.continue_from_here()

    def restore(self) -> None:
        """Restore the loaded state, if there is one, and write the line of a round."""
        state, self._restored = self._restored, None
        if state is not None:
            with refusing_misfits("the state of the checkpoint"):
                self.state.load_local(state)
                self.state.load_settings(state)
                self.state.load_position(state)
            if self._checkpoints is not None:
                self._checkpoints.restore(state, state["steps"])
            elif self.restore_objects is not None:
                self.restore_objects(state)
            if not state.get("is_in_memory"):
                self.saved = state["steps"], self.log.size
            if self.has_joined:  # all ranks count attempts from the beginning of the round
                position = self.state.position
                position.attempt = Attempt(position.attempt.trainer, position.steps, -1)
        if self.round_line:
            line, self.round_line = self.round_line, {}
            self._history.write("round", **line, continued=time.time())
            report_to_launcher({"kind": "resumed"})

    def describe(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks: the positions of training and script."""
        position = self.state.position_state()
        position |= {"script": self.log.state_dict(position["steps"]), **self.training}
        return position | {"trainer": self.state.position.attempt.trainer, "time": time.time()}


class SafePoints:
    """What happens at the safe points of a script.

    Args:
        position: The position of the script.
        history: The history, to which the lines about checkpoints are written.
        checkpoints: The checkpoints of the run; None for a trainer without them.
        member: This process as a member of an elastic run; None outside of one.

    Attributes:
        ending_round: The round at whose end, as rank 0 has reported, members join or leave; -1 for
            none.
        saves: The number of checkpoints that were begun.
        is_logged: Whether the script may be continued by another process.
    """

    def __init__(
        self,
        position: ScriptPosition,
        history: History,
        checkpoints: RunCheckpoints | None,
        member: Membership | None,
    ) -> None:
        self._position, self._history = position, history
        self._checkpoints, self._member = checkpoints, member
        self.ending_round, self.saves = -1, 0
        self.is_logged = checkpoints is not None

    def reach(self, epoch: OpenEpoch | None = None, *, ask: bool = False) -> None:
        """Note that the script can be continued from here, and save a checkpoint if one is due.

        Args:
            epoch: The iteration whose loop the script is in; None outside of loops over batches.
            ask: Whether the ranks exchange whether one of them was asked to stop.

        Raises:
            StoppedOnRequest: On every rank, if one of them was asked to stop.
        """
        if self._position.is_inside(epoch):
            return
        if self._position.is_replaying:
            return
        if self._checkpoints is not None:
            self._save_if_wanted(self._checkpoints, ask)
        member = self._member
        if member is not None and self.ending_round == member.round:  # not outdated by a loss
            self.ending_round = -1
            self._admit(member)

    def _admit(self, member: Membership) -> None:
        """Let members join and leave, after a checkpoint if processes cannot stay."""
        if not member.can_stay and self._checkpoints is None:
            if dist.get_rank() == 0:
                log(
                    "the number of ranks stays: the processes of this run cannot continue with "
                    "other ranks, and there is no checkpoint to continue from: pass "
                    "checkpoint=ls.CheckpointConfig() to the trainer"
                )
            member.newcomers = 0  # otherwise they would ask again in the next step
            return
        if not member.can_stay and self._checkpoints is not None:
            self._save_and_wait(self._checkpoints)
        member.admit()

    def note_manual_step(self) -> None:
        """Log a step whose micro-batches the script computed itself."""
        self._position.log.record_manual_step(self._position.steps)

    # --- saving -------------------------------------------------------------------------------

    def _save_if_wanted(self, checkpoints: RunCheckpoints, ask: bool) -> None:
        if ask:
            checkpoints.agree_to_stop()
        if not checkpoints.is_wanted:
            return
        if not checkpoints.is_stopping:
            self._save(checkpoints)
        else:
            steps = self._position.steps
            saved = self._save_and_wait(checkpoints)
            message = f"stopped on request after step {steps}"
            if saved is not None:
                message += f"; checkpoint: {os.path.relpath(saved.path)}"
                log(message)
            raise StoppedOnRequest(message)

    def stop(self, reason: str) -> None:
        """Stop the training, for a reason that all ranks know, at the next safe point.

        Raises:
            WorkError: There are no checkpoints.
        """
        if self._checkpoints is None:
            raise WorkError(reason)
        log(reason)
        self._checkpoints.stop.signal = "audit"

    def _save_and_wait(self, checkpoints: RunCheckpoints) -> SavedCheckpoint | None:
        """Save a checkpoint, again if the rank that writes it is lost; return it on rank 0."""
        is_there = False
        while not is_there:
            self._save(checkpoints)
            is_there, saved = checkpoints.wait(self._position.steps)
        return saved

    def abandon(self) -> None:
        """Abandon the checkpoint that is being written."""
        if self._checkpoints is not None:
            self._checkpoints.writer.abandon()
            self._position.saved = (-1, -1)

    def finish(self, state: str) -> FileError | UsageError | None:
        """Save the last checkpoint of a training that is done; called on every rank.

        Returns:
            On every rank, the error if it could not be saved, or if a resumed script ended before
            it reached the position of the interrupted one.
        """
        checkpoints = self._checkpoints
        if checkpoints is None:
            return None
        try:
            if state == "done" and checkpoints.is_open:
                self._position.log.require_finished()
                is_saved = self._position.saved == self._position.current
                if not (is_saved and checkpoints.wait(self._position.steps)[0]):
                    self._save_and_wait(checkpoints)
            elif state == "failed":
                self.abandon()
        except (FileError, UsageError) as error:
            return error
        finally:
            checkpoints.close()
            checkpoints.report(self._history)
        return None

    def report_saved(self) -> None:
        """Write the completed checkpoints to the record."""
        if self._checkpoints is not None:
            self._checkpoints.report(self._history)

    def _save(self, checkpoints: RunCheckpoints) -> None:
        checkpoints.writer.wait()
        checkpoints.report(self._history)
        begun = time.perf_counter()
        self.saves += 1
        position = self._position.describe()
        is_sharded = self._position.state.placement is not None
        local = self._position.state.local_state()
        self._position.saved = self._position.current
        checkpoints.save(local, position, position["steps"], self.saves, is_sharded, begun)

    def take_part(self) -> None:
        """Let other processes of an elastic run continue the script."""
        self.is_logged = True


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
