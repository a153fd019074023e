"""The run of a script that can be interrupted at any moment and resumed.

    script log        the calls that the script has completed, and their answers  script_log.py
    state             weights, optimizer, position                                state.py
    checkpoints       the script log and the state, on disk                       run_checkpoints.py

                   ┌─ answered from the log ┐ state is ┌─ with effect; checkpoints are saved ─
    resumed script │ batches, evaluate, ... │ restored │ batches, step, evaluate, ...

A checkpoint is saved where a script can be continued: between two batches of its outermost loop,
or after a call outside of any loop over batches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.folder import read_checkpoint, refusing_misfits
from lockstep.checkpoint.schedule import Stateful
from lockstep.checkpoint.stop_request import StoppedOnRequest
from lockstep.checkpoint.writer import SavedCheckpoint
from lockstep.data.content_hash import hash_content
from lockstep.data.loader import Batches
from lockstep.data.microbatch import Batch
from lockstep.data.samplers import KnownSamplers
from lockstep.elastic.membership import Membership
from lockstep.elastic.restart_source import RestartSource, find_restart_source
from lockstep.kernel.errors import FileError, LockstepError, UsageError
from lockstep.kernel.step_context import Attempt
from lockstep.launcher.rank_process import report_to_launcher
from lockstep.launcher.run_folder import is_resuming
from lockstep.messages import say
from lockstep.model.generator_states import global_states
from lockstep.model.parallel_context import ParallelContext
from lockstep.training.compatibility import (
    describe_training,
    find_differences,
    require_same_training,
    say_continued,
    say_resumed,
)
from lockstep.training.hand_over import HandOver, read_newest_state
from lockstep.training.history import History
from lockstep.training.repeated_work import measure_repeated_work
from lockstep.training.run_checkpoints import RunCheckpoints, restore_objects
from lockstep.training.run_record import RunRecord
from lockstep.training.script_log import OpenEpoch, ScriptLog
from lockstep.training.state import TrainingState

__all__ = ["ResumableRun"]


class ResumableRun:
    """The run of a trainer: answers the calls of a resumed script, saves and restores the state.

    Args:
        state: The state that is saved and restored.
        history: The history, to which the lines about checkpoints are written.
        settings: The description of model, optimizer and arguments.
        parallel: The layout.
        record: The record of the run.
        checkpoints: The checkpoints of the run; None for a trainer without them.
        member: This process as a member of an elastic run; None outside of one.

    Attributes:
        has_begun: Whether the script has made its first call, or the run was resumed.
        ending_round: The round at whose end, as rank 0 has reported, members join or leave; -1 for
            none.
        resumed_from: The number of steps that the training was resumed after; None if it was not.
    """

    def __init__(
        self,
        state: TrainingState,
        history: History,
        settings: Mapping[str, str],
        parallel: ParallelContext,
        record: RunRecord,
        checkpoints: RunCheckpoints | None,
        member: Membership | None,
    ) -> None:
        self._state, self._history, self._settings = state, history, settings
        self._parallel, self._record, self._checkpoints = parallel, record, checkpoints
        self._member = member
        self.has_begun = False
        self.ending_round = -1
        self._has_joined = False
        self._log, self._samplers = ScriptLog(), KnownSamplers()
        if checkpoints is not None:
            checkpoints.require_encodable(state.local_state())
        self._saves = 0
        self._saved = (-1, -1)  # steps and size of the log in the latest checkpoint
        self._restored: dict[str, Any] | None = None  # until the script reaches it
        self._restore_objects: Callable[[Mapping[str, Any]], None] | None = None
        self.resumed_from: int | None = None
        self._origin = find_restart_source()
        self._round: dict[str, Any] = {}  # its line is written after the state is restored
        self._hand_over: HandOver | None = None

    @cached_property
    def _training(self) -> dict[str, Any]:
        return describe_training(self._settings)

    # --- resuming -------------------------------------------------------------------------

    @property
    def is_resuming(self) -> bool:
        """Whether this process was launched to continue a training."""
        return self._origin is not None or (self._checkpoints is not None and is_resuming())

    def resume(self, place: str | Path | None, layout: Mapping[str, Any]) -> None:
        """Find and load a checkpoint, and answer the script's calls up to where it was saved.

        Args:
            place: The path of a checkpoint or of a run; None: this run.
            layout: The record's description of this process and its layout.
        """
        if self._origin is not None:
            if not self.has_begun:
                self._continue_round(self._origin, layout)
            if self.resumed_from is not None or place is None:
                return  # a script that calls resume did so in the first round
        checkpoints = self._require("resume")
        checkpoints.select(place)
        differences: list[str] = []
        steps, epochs, backlog = 0, 0, list[Any]()
        try:
            path = checkpoints.find(place)
            if path is not None:
                state = checkpoints.read(path)
                differences = self._load(state)
                checkpoints.set_aside_newer(path, state["steps"])
                steps, epochs = state["steps"], state["history"]["epochs"]
                backlog = state.get("backlog", []) if place is None else []
        except LockstepError:
            checkpoints.deselect()
            raise
        self.resumed_from = steps
        checkpoints.open_loggers()
        if self._parallel.rank == 0:
            say_resumed(path, steps, differences)
            self._history.write_missing(backlog)
        self._history.write(
            "resume",
            step=steps,
            epochs=epochs,
            checkpoint=None if path is None else str(path),
            differences=differences,
            **layout,
        )
        if not self._log.is_replaying:
            self._restore()

    def replay_from(
        self, path: Path, stateful: Mapping[str, Stateful], device: torch.device
    ) -> None:
        """Answer the script's calls up to a checkpoint as `resume` does, and write nothing.

        Args:
            path: The path of the checkpoint.
            stateful: The registered objects, by name.
            device: The device of the trainer.
        """
        state = read_checkpoint(path)
        self._load(state)
        self.resumed_from = state["steps"]
        self._restore_objects = partial(restore_objects, stateful, device=device)
        if not self._log.is_replaying:
            self._restore()

    def _continue_round(self, origin: RestartSource, layout: Mapping[str, Any]) -> None:
        """Continue from the state of the last round, or from the beginning if there is none."""
        checkpoints, number = self._checkpoints, self._state.position.attempt.trainer
        path, state = read_newest_state(origin, checkpoints, number)
        steps = 0 if state is None else state["steps"]
        if state is not None:
            self._load(state)
            self._restore_objects = partial(restore_objects, {}, device=self._state.device)
            self.resumed_from = steps
        if checkpoints is not None:
            checkpoints.open_loggers()
        elif self._parallel.rank == 0:
            self._record.open_replaced(number)
        if self._parallel.rank == 0:
            say_continued(origin, path, steps, checkpoints is not None)
            self._history.write_missing((state or {}).get("backlog", ()))
        if self._member is not None:
            self._record.agree_on_folder(self._parallel.group)
        self.has_begun = True
        self._round = origin.describe_round() | {
            "step": steps,
            "epochs": state["history"]["epochs"] if state is not None else 0,
            "world_size": layout["layout"]["world_size"],
            "undone": measure_repeated_work(origin, state, self._history.find_run_folder()),
        }
        if not self._log.is_replaying:
            self._restore()

    def _load(self, state: dict[str, Any]) -> list[str]:
        """Load a checkpoint's state and its log of calls; return the differences as sentences."""
        here = self._state.position_state() | self._training
        require_same_training(state, here)
        with refusing_misfits("the state of the checkpoint"):
            self._log.load_state_dict(state["script"])
            self._samplers.load_state_dict(state["known_samplers"])
            self._state.load_local(state)
        self._restored = state
        return find_differences(state, here, self._state.describe_optimization())

    def begin(self) -> None:
        """Begin the run with the script's first call, unless it is resumed."""
        if self.has_begun or self.join():
            return
        if self._checkpoints is not None:
            self._checkpoints.begin()
        elif self._parallel.rank == 0:
            self._record.begin()
        if self._member is not None:
            self._record.agree_on_folder(self._parallel.group)
        self.has_begun = True

    # --- members of an elastic run ----------------------------------------------------------

    def join(self) -> bool:
        """Join a running elastic run if this process is a newcomer; return whether it is one."""
        member = self._member
        if member is None or not member.is_waiting:
            return False
        member.join()
        self.has_begun = self._has_joined = True
        if not self._log.is_replaying:
            self._restore()
        return True

    def is_caught_up(self, epoch: OpenEpoch) -> bool:
        """Return whether a newcomer continues this iteration in the middle, where all others are.

        The others have already compared the data and reached the safe point before its first batch.
        """
        return self._has_joined and epoch.resumed is not None

    def promote(self, loggers: Any) -> None:
        """Replace the lost rank 0: continue the record, and save checkpoints."""
        self._record.take_over(loggers)
        if self._checkpoints is not None:
            self._checkpoints.promote()

    def collect_state(self) -> dict[str, Any]:
        """Return the state from which a newcomer continues; called at a safe point."""
        state = self._describe_position() | self._state.local_state()
        state |= {"folder": self._record.agreed, "resumed_from": self.resumed_from}
        state |= {"saved": (self._saves, self._saved), "is_in_memory": True}
        state["generators"] = global_states(self._parallel.device)
        if self._checkpoints is None:
            return state | {"stateful": {}}
        plans = self._checkpoints.collect_plans()
        return state | {"stateful": self._checkpoints.collect_objects(), "plans": plans}

    def receive_state(self, state: dict[str, Any]) -> None:
        """Continue from a state that `collect_state` returned on another rank."""
        self._load(state)
        self.resumed_from = state["resumed_from"]
        self._record.agreed = folder, name = state["folder"]
        self._saves, self._saved = state["saved"]
        if self._checkpoints is not None:
            self._checkpoints.adopt(Path(folder), name, state["plans"])
        else:
            self._restore_objects = partial(restore_objects, {}, device=self._parallel.device)

    @property
    def is_replaying(self) -> bool:
        """Whether the script has not yet reached the position of the interrupted one."""
        return self._restored is not None

    def _restore(self) -> None:
        state, self._restored = self._restored, None
        if state is not None:
            with refusing_misfits("the state of the checkpoint"):
                self._state.load_local(state)
                self._state.load_settings(state)
                # Samplers have been restored already, or are when they are first used.
                self._state.load_position({**state, "samplers": []})
            if self._checkpoints is not None:
                self._checkpoints.restore(state, state["steps"])
            elif self._restore_objects is not None:
                self._restore_objects(state)
            if not state.get("is_in_memory"):
                self._saved = state["steps"], self._log.size
            if self._has_joined:  # all ranks count attempts from the beginning of the round
                position = self._state.position
                position.attempt = Attempt(position.attempt.trainer, position.steps, -1)
        if self._round:
            line, self._round = self._round, {}
            self._history.write("round", **line, continued=time.time())
            if state is not None or self._origin is None or self._origin.state is None:
                report_to_launcher({"kind": "resumed"})

    def _note_answer(self, steps: int) -> None:
        self._state.position.steps = steps
        if not self._log.is_replaying:
            self._restore()

    # --- the script's calls -----------------------------------------------------------------

    def call(self, kind: str, call: Callable[[], Any], ask: bool = False, **asked: Any) -> Any:
        """Make a call of the script, or return the result of the interrupted run.

        Args:
            kind: "evaluation" or "save".
            call: The function that makes the call. Its result is logged unchanged.
            ask: Whether the ranks then exchange whether one of them was asked to stop.
            asked: The properties of the call that must be equal to those in the interrupted run.
        """
        self.begin()
        answer = self._log.answer(kind, **asked)
        if answer is not None:
            self._note_answer(answer["steps"])
            return answer["result"]
        result = call()
        self._log.record(kind, self._state.position.steps, result=result, **asked)
        self.reach_safe_point(ask=ask)
        return result

    def evaluate(self, batches: Batches, call: Callable[[], Any], *, ema: bool) -> Any:
        """Evaluate, or return the result of the interrupted run."""
        self.begin()
        self.use_sampler(batches)
        samples = batches.state_dict()["samples"]
        return self.call("evaluation", call, ask=True, samples=samples, ema=ema)

    def use_sampler(self, batches: Batches) -> None:
        """Restore the state of the batches' sampler if this is its first use."""
        if self._is_logged or self.resumed_from is not None:
            self._samplers.use(batches.user_sampler())

    def call_step(self, batch: Any, step: Callable[[], float]) -> float:
        """Take a step, or return its loss in the interrupted run; `batch` may be of any origin."""
        self.begin()
        if not (self._is_logged or self._log.is_replaying) or self._log.is_inside_epoch:
            return step()
        is_loaded = isinstance(batch, Batch)
        identity = batch.identity.pack() if is_loaded else str(hash_content(batch))
        answer = self._log.answer_step(identity)
        if answer is not None:
            loss, steps = answer
            self._note_answer(steps)
            return loss
        loss = step()
        self._log.record_step(self._state.position.steps, loss, identity)
        self.reach_safe_point()
        return loss

    def call_digest(self, name: str, digest: Callable[[], str]) -> str:
        """Return the current digest, or the digest of the interrupted run at this place."""
        self.join()
        steps = self._state.position.steps
        value = self._log.answer_digest(name, steps) or digest()
        self._log.record_digest(name, value, steps)
        self._note_safe_point()
        return value

    def require_repeatable_step(self) -> None:
        """Raise UsageError for a manual step that a resumed script would have to repeat."""
        self.begin()
        if self.is_replaying:
            raise UsageError(
                "a resumed script cannot repeat trainer.manual_step() outside of a loop over "
                "trainer.batches(...): take its batches from there"
            )

    def begin_epoch(self, batches: Batches) -> OpenEpoch | None:
        """Begin an iteration over batches; return None if the interrupted run completed it."""
        epoch, entry = self._log.begin_epoch(batches)
        if epoch is None:
            assert entry is not None, "only an iteration that was complete has an answer"
            self._note_answer(entry["steps"])
        elif epoch.resumed is not None:
            batches.load_state_dict(epoch.resumed)
            self._restore()
        self._note_safe_point(epoch)
        return epoch

    def yielded(self, epoch: OpenEpoch) -> None:
        """Note that the next batch is about to be trained."""
        epoch.begun_at = self._state.position.steps
        if self._hand_over is not None and self._hand_over.is_outdated:
            self._note_safe_point(epoch)

    def trained(self, epoch: OpenEpoch) -> None:
        """Note that the script requests another batch, so the last one is completed."""
        epoch.begun_at = -1
        if self._log.is_outermost(epoch):
            self._log.complete_batches()  # also of inner iterations, such as those of zip
        self.reach_safe_point(epoch)

    def end_epoch(self, epoch: OpenEpoch) -> None:
        """End an iteration, completed or left by the script."""
        self._log.end_epoch(epoch, self._state.position.steps)

    # --- saving -------------------------------------------------------------------------------

    def note_manual_step(self) -> None:
        """Log a step whose micro-batches the script computed itself."""
        self._log.record_manual_step(self._state.position.steps)

    def reach_safe_point(self, epoch: OpenEpoch | None = None, *, ask: bool = False) -> None:
        """Note that the script can be continued from here, and save a checkpoint if one is due.

        Args:
            epoch: The iteration whose loop the script is in; None outside of loops over batches.
            ask: Whether the ranks exchange whether one of them was asked to stop.

        Raises:
            StoppedOnRequest: On every rank, if one of them was asked to stop.
        """
        if self._is_inside(epoch):
            return
        self._hand_over_if_wanted(epoch)
        if self.is_replaying:
            return
        if self._checkpoints is not None:
            self._save_if_wanted(self._checkpoints, ask)
        member = self._member
        if member is not None and self.ending_round == member.round:  # not outdated by a loss
            self.ending_round = -1
            self._note_safe_point(epoch)  # processes that cannot stay hand over
            member.admit()
        self._note_safe_point(epoch)  # last, since saving a checkpoint performs operations

    def _save_if_wanted(self, checkpoints: RunCheckpoints, ask: bool) -> None:
        if ask:
            checkpoints.agree_to_stop()
        if checkpoints.is_mirror_wanted:
            self._save(checkpoints, is_mirror=True)
        if not checkpoints.is_wanted:
            return
        if not checkpoints.is_stopping:
            self._save(checkpoints)
        else:
            steps = self._state.position.steps
            saved = self._save_and_wait(checkpoints)
            message = f"stopped on request after step {steps}"
            if saved is not None:
                message += f"; checkpoint: {os.path.relpath(saved.path)}"
                say(message)
            raise StoppedOnRequest(message)

    def _is_inside(self, epoch: OpenEpoch | None) -> bool:
        """Return whether the script is in the body of a loop over batches other than `epoch`."""
        return self._log.is_inside_epoch if epoch is None else not self._log.is_outermost(epoch)

    def save_to(self, path: Path) -> None:
        """Save a checkpoint to a folder that the user chose, and wait until it is complete."""
        checkpoints = self._require("save_checkpoint")
        self.begin()
        checkpoints.require_free(path)
        if not self.is_replaying:
            self._save_and_wait(checkpoints, path.absolute())

    def _save_and_wait(
        self, checkpoints: RunCheckpoints, path: Path | None = None
    ) -> SavedCheckpoint | None:
        """Save a checkpoint, again if the rank that writes it is lost; return it on rank 0."""
        is_there = False
        while not is_there:
            self._save(checkpoints, path)
            is_there, saved = checkpoints.wait(self._state.position.steps)
        return saved

    def abandon(self) -> None:
        """Abandon the checkpoint that is being written."""
        if self._checkpoints is not None:
            self._checkpoints.abandon()
            self._saved = (-1, -1)

    def finish(self, state: str) -> FileError | UsageError | None:
        """Save the last checkpoint of a training that is done; called on every rank.

        Returns:
            On every rank, the error if it could not be saved, or if a resumed script ended before
            it reached the position of the interrupted one.
        """
        checkpoints = self._checkpoints
        if checkpoints is None:
            self.begin()
            return None
        try:
            if state == "done" and checkpoints.is_open:
                self._log.require_finished()
                steps = self._state.position.steps
                if self._saved != (steps, self._log.size) or not checkpoints.wait(steps)[0]:
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

    def _save(
        self, checkpoints: RunCheckpoints, path: Path | None = None, *, is_mirror: bool = False
    ) -> None:
        if not is_mirror:
            checkpoints.writer.wait()
        checkpoints.report(self._history)
        begun = time.perf_counter()
        self._saves += 1
        position = self._describe_position()
        is_sharded = self._state.placement is not None
        local = self._state.local_state()
        if path is None and not is_mirror:
            self._saved = position["steps"], self._log.size
        arguments = (local, position, position["steps"], self._saves, is_sharded, path, begun)
        checkpoints.save(*arguments, is_mirror=is_mirror)

    def _describe_position(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks: the positions of training and script."""
        position = self._state.position_state()
        position |= {"script": self._log.state_dict(position["steps"]), **self._training}
        position |= {"trainer": self._state.position.attempt.trainer, "time": time.time()}
        return position | {"known_samplers": self._samplers.state_dict()}

    # --- handing over -------------------------------------------------------------------------

    @property
    def _is_logged(self) -> bool:
        """Whether the script may be continued by another process."""
        return self._checkpoints is not None or self._hand_over is not None

    def take_part(self, member: Membership) -> None:
        """Prepare to hand over the state, as a member of an elastic run."""
        stateful = {} if self._checkpoints is None else self._checkpoints.stateful
        self._hand_over = HandOver(member, self._state, stateful, self, self._state.device)

    @property
    def can_hand_over(self) -> bool:
        """Whether this rank can write the state from before the operation that the script is in."""
        return self._hand_over is not None and not self.is_replaying and self._hand_over.is_possible

    def hand_over(self, folder: Path, *, is_now: bool = False) -> None:
        """Write this rank's part of the state, for a process of the next round.

        Args:
            folder: The folder to write to.
            is_now: Whether the script is at a safe point now; False: it is in the first operation
                after one.
        """
        assert self._hand_over is not None, "only members of an elastic run hand over"
        self.abandon()
        try:
            common = self._describe_position() | {"backlog": self._history.backlog}
            self._hand_over.write(folder, common, self._state.part, is_now)
        except (FileError, UsageError) as error:
            say(f"the state cannot be handed over: {error}")
        else:
            checkpoints = self._checkpoints
            place = str(checkpoints.folder) if checkpoints and checkpoints.is_open else ""
            report_to_launcher({"kind": "handed_over", "checkpoints": place})

    def _note_safe_point(self, epoch: OpenEpoch | None = None) -> None:
        self._hand_over_if_wanted(epoch)
        if self._hand_over is not None and not (self.is_replaying or self._is_inside(epoch)):
            self._hand_over.note_safe_point()

    def _hand_over_if_wanted(self, epoch: OpenEpoch | None) -> None:
        """Hand over the state and leave, if the script can be continued from here."""
        if self._hand_over is None or self.is_replaying or self._is_inside(epoch):
            return
        if (folder := self._hand_over.member.hand_over_folder) is not None:
            self.hand_over(folder, is_now=True)
            self._hand_over.member.leave()

    def _require(self, call: str) -> RunCheckpoints:
        if self._checkpoints is None:
            raise UsageError(
                f"trainer.{call}() needs the folder and the objects of checkpoints: pass "
                "checkpoint=ls.CheckpointConfig() to the trainer"
            )
        return self._checkpoints
