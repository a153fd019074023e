"""Safe points: where a script can be continued, its state is saved or handed over.

These are between two batches of the outermost loop of a script, and after a call outside of any
loop over batches.

    at a safe point     a checkpoint is saved if one is due, or if a rank was asked to stop
                        members of an elastic run join and leave
                        the state is handed over if this process is replaced
    within an operation the state of the latest safe point is handed over, if it still exists

In every step, all ranks learn what is to be done at the next safe point.
"""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import Any

from lockstep.checkpoint.stop_request import StoppedOnRequest
from lockstep.checkpoint.writer import SavedCheckpoint
from lockstep.elastic.membership import Membership
from lockstep.kernel.errors import FileError, UsageError, WorkError
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import CommittedStep, StepHook
from lockstep.launcher.rank_process import report_to_launcher
from lockstep.messages import log
from lockstep.training.resume.last_safe_state import LastSafeState
from lockstep.training.resume.run_checkpoints import RunCheckpoints
from lockstep.training.resume.script_log import OpenEpoch
from lockstep.training.resume.script_position import ScriptPosition
from lockstep.training.resume.state_description import describe_all
from lockstep.training.script_loop.unsaved_modules import UnsavedModules
from lockstep.training.services import Services

__all__ = ["SafePoints"]

_all: weakref.WeakSet[SafePoints] = weakref.WeakSet()
"""Those of all trainers of this process."""


# It has many methods: one for each thing that may happen at a safe point.
class SafePoints(StepHook):
    """The work at the safe points of a script, and the hook by which ranks ask for it.

    Args:
        position: The position of the script.
        checkpoints: The checkpoints of the run; None for a trainer without them.
        member: This process as a member of an elastic run; None outside of one.

    Attributes:
        saves: The number of checkpoints that were begun.
        is_logged: Whether the script may be continued by another process.
    """

    name = "safe_points"

    def __init__(
        self,
        position: ScriptPosition,
        checkpoints: RunCheckpoints | None,
        member: Membership | None,
    ) -> None:
        self._position = position
        self._modules = UnsavedModules(position)
        self._history = position.state.history
        self._checkpoints = checkpoints
        self._member = member
        self._is_due = False
        self.saves = 0
        self._asked_round = -1  # at whose end members join or leave, as this rank knows; -1: none
        self._ending_round = -1  # the same, as rank 0 has told all ranks
        self._safe_state: LastSafeState | None = None
        self.is_logged = checkpoints is not None
        self._parameters = 0  # of the optimizer, at the beginning of the outermost loop
        self._after_call = ""  # what the script can change, after its latest call; "": not known
        # The steps of trainers that are not saved, when the loop first saw them: one that is made
        # and trained in a body need not outlive it.
        self._unsaved = weakref.WeakKeyDictionary[SafePoints, int]()
        _all.add(self)

    def reach(
        self, epoch: OpenEpoch | None = None, *, ask: bool = False, is_step: bool = False
    ) -> None:
        """Note that the script can be continued from here, and save a checkpoint if one is due.

        Args:
            epoch: The iteration whose loop the script is in; None outside of loops over batches.
            ask: Whether the ranks exchange whether one of them was asked to stop.
            is_step: Whether this is after a step outside of loops over batches.

        Raises:
            StoppedOnRequest: On every rank, if one of them was asked to stop.
        """
        if self._position.is_inside(epoch):
            return
        self._transfer_if_wanted(epoch)
        if self._position.is_replaying:
            return
        if self.is_logged:
            self._require_positions()
            self._require_known_schedulers()
            if epoch is not None:
                self._require_same_parameters()
        if self._checkpoints is not None:
            # Without them, an elastic run of several trainers begins again with all of them.
            if epoch is not None:
                self._require_registered()
            self._save_if_wanted(self._checkpoints, ask)
        member = self._member
        if member is not None and self._ending_round == member.round:  # not outdated by a loss
            self._ending_round = -1
            self.note(epoch)  # processes that cannot stay hand over
            member.admit()
        self.note(epoch)  # last, since saving a checkpoint performs operations
        self._after_call = ""
        if epoch is None and not is_step:  # after each step, it would take too long
            self.note_call()

    def enter(self) -> None:
        """Note that the script enters the outermost loop over batches."""
        self._parameters = len(self._position.state.optimization.parameters)
        self._unsaved.clear()
        self._modules.forget()

    def note_call(self) -> None:
        """Note what the script can change, after a call outside of loops over batches."""
        if self._checkpoints is not None and self._position.is_safe(None):
            self._after_call = self._describe_all()

    def _describe_all(self) -> str:
        return describe_all(self._position.state, self._position.stateful)

    def note(self, epoch: OpenEpoch | None = None) -> None:
        """Note that the script can be continued from here, unless it is inside of a loop."""
        self._transfer_if_wanted(epoch)
        if self._safe_state is not None and self._position.is_safe(epoch):
            self._safe_state.note_safe_point()

    def note_if_outdated(self, epoch: OpenEpoch) -> None:
        """Note a safe point if the ranks have completed an operation since the latest one."""
        if self._safe_state is not None and self._safe_state.is_outdated:
            self.note(epoch)

    # --- in a step ----------------------------------------------------------------------------

    def begin(self, step: StepContext, batch: Any) -> None:
        """Decide whether this rank wants a checkpoint, and ask the launcher for newcomers."""
        self._modules.check(step)
        checkpoints = self._checkpoints
        member = self._member
        self._is_due = checkpoints is not None and checkpoints.is_due_after(step.number + 1)
        is_asked = member is not None and step.parallel.rank == 0 and member.poll()
        self._asked_round = member.round if member is not None and is_asked else -1

    def status(self, step: StepContext) -> tuple[bool, str, int]:
        """Return whether a checkpoint is due, the signal to stop, and the round that ends."""
        signal = "" if self._checkpoints is None else self._checkpoints.stop.signal
        return self._is_due, signal, self._asked_round

    def merge(self, left: tuple[bool, str, int], right: tuple[bool, str, int]) -> Any:
        """Return what the lowest rank wants, and the first signal."""
        return left[0], left[1] or right[1], left[2]

    def report(self, committed: CommittedStep) -> None:
        """Note what is to be done at the next safe point, and log a manual step."""
        is_due, signal, self._ending_round = committed.summary.hooks[self.name]
        if self._checkpoints is not None:
            self._checkpoints.note_step(is_due, signal, committed.step.number + 1)
            self.report_saved()
        if committed.is_manual:  # so that a resumed script does not repeat it unnoticed
            self._position.log.record_manual_step(self._position.steps)

    # --- saving -------------------------------------------------------------------------------

    def _require_positions(self) -> None:
        """Raise UsageError if another trainer iterates over batches, whose position is not saved.

        It is checked at each safe point, since the first checkpoint may be saved hours later.
        """
        for name, one in self._position.stateful.items():
            if isinstance(one, Services) and one.engine.run.is_inside_epoch:
                raise UsageError(
                    f"stateful[{name!r}] iterates over batches of its own, whose position no "
                    "checkpoint contains: train it on the batches of the trainer that has "
                    "checkpoint=, by use(batch) of ls.exact or step(batch) of ls.Trainer, or end "
                    "its loop in the body of the other one"
                )

    def _require_known_schedulers(self) -> None:
        """Raise UsageError if an optimizer has a scheduler that no checkpoint contains."""
        for schedule in self._position.state.optimization.schedules:
            optimizer = schedule.optimizer
            # torch marks the step of an optimizer when a scheduler is made for it.
            has_scheduler = hasattr(optimizer.step, "_wrapped_by_lr_sched")
            if not has_scheduler or schedule.scheduler is not None:
                continue
            # Not by `getattr`, for which a trainer may raise UsageError.
            registered = [getattr(o, "__dict__", {}) for o in self._position.stateful.values()]
            if not any(own.get("optimizer") is optimizer for own in registered):
                raise UsageError(
                    f"a learning-rate scheduler of the {type(optimizer).__name__} that no "
                    "checkpoint contains would begin again when the run is continued: pass it as "
                    "scheduler= to ls.exact, or a function that makes it to ls.OptimizerConfig"
                )

    def _require_same_parameters(self) -> None:
        """Raise UsageError if the body of the loop, which is not repeated, has added parameters."""
        if len(self._position.state.optimization.parameters) != self._parameters:
            raise UsageError(
                "optimizer.add_param_group() was called in the body of a loop over batches, which "
                "a resumed run does not repeat: call it between two epochs, or begin with all "
                "groups, and give those that are trained later a learning rate of 0"
            )

    def _require_registered(self) -> None:
        """Raise UsageError if the body of the loop trains a model that no checkpoint contains."""
        registered = self._position.stateful.values()
        saved = [one.engine.run.safe_points for one in registered if isinstance(one, Services)]
        for other in _all:
            if other is self or other in saved or other._checkpoints is not None:
                continue
            steps = other._position.steps
            if self._unsaved.setdefault(other, steps) != steps:
                raise UsageError(
                    "a trainer or handle of ls.exact that is trained in a loop over the batches of "
                    "another one would begin again when the run is continued: register it there, "
                    "as in ls.exact(model, optimizer, stateful={'other': other}) or "
                    "CheckpointConfig(stateful={'other': other})"
                )

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
                opened = self._position.log.describe_open()
                if opened and self._position.state.parallel.rank == 0:
                    log(opened)
                if not self._position.end():
                    self._record_end(checkpoints)
                is_saved = self._position.saved == self._position.current
                if not (is_saved and checkpoints.wait(self._position.steps)[0]):
                    self._save_and_wait(checkpoints)
            elif state == "failed":
                self.abandon()
        except (FileError, UsageError) as error:
            return error
        finally:
            checkpoints.close()
            checkpoints.report(self._history, is_last=True)
        return None

    def _record_end(self, checkpoints: RunCheckpoints) -> None:
        """Log that the script has changed the state since its last call, if it has."""
        before = self._after_call
        now = self._describe_all()
        if checkpoints.agree_to_log_end(not now or now != before):
            self._position.log.record_end(self._position.steps)

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
        self._position.state.publish_edits()
        is_sharded = self._position.state.placement is not None
        local = self._position.state.local_state()
        self._position.saved = self._position.current
        checkpoints.save(local, position, position["steps"], self.saves, is_sharded, begun)

    # --- handing over -------------------------------------------------------------------------

    def take_part(self, member: Membership, run: object) -> None:
        """Prepare to hand over the state, as a member of an elastic run.

        Args:
            member: This process.
            run: The run, by which its trainer is found among the registered objects of others.
        """
        state = self._position.state
        stateful = self._position.stateful
        self._safe_state = LastSafeState(member, state, stateful, run)
        self.is_logged = True

    @property
    def can_transfer_state(self) -> bool:
        """Whether this rank can write the state from before the operation that the script is in."""
        is_here = not self._position.is_replaying
        return self._safe_state is not None and is_here and self._safe_state.is_possible

    def transfer_state(self, folder: Path, *, is_now: bool = False) -> None:
        """Write this rank's part of the state, for a process of the next round.

        Args:
            folder: The folder to write to.
            is_now: Whether the script is at a safe point now; False: it is in the first operation
                after one.
        """
        assert self._safe_state is not None, "only members of an elastic run hand over"
        self.abandon()
        try:
            common = self._position.describe() | {"backlog": self._history.backlog}
            self._safe_state.write(folder, common, self._position.state.part, is_now)
        except (FileError, UsageError) as error:
            log(f"the state cannot be handed over: {error}")
        else:
            report_to_launcher({"kind": "transferred"})

    def _transfer_if_wanted(self, epoch: OpenEpoch | None) -> None:
        """Hand over the state and leave, if the script can be continued from here."""
        if self._safe_state is None or not self._position.is_safe(epoch):
            return
        if (folder := self._safe_state.member.transfer_folder) is not None:
            self.transfer_state(folder, is_now=True)
            self._safe_state.member.leave()
