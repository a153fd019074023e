"""The run of a script that can be interrupted at any moment and resumed.

position          the calls that the script has completed, and the state      script_position.py
safe points       where the position is saved or handed over                  safe_points.py
checkpoints       positions on disk                                           run_checkpoints.py

┌─ answered from the log ┐ state is ┌─ with effect; checkpoints are saved ─
resumed script │ batches, evaluate, ... │ restored │ batches, step, evaluate, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.checkpoint.folder import read_checkpoint
from lockstep.checkpoint.save_schedule import Stateful
from lockstep.data.content_hash import hash_content
from lockstep.data.loader import EpochBatches
from lockstep.elastic.membership import Membership
from lockstep.elastic.restart_source import RestartSource, find_restart_source
from lockstep.kernel.batch import Batch
from lockstep.kernel.errors import FileError, LockstepError, UsageError
from lockstep.kernel.step_hooks import StepResult
from lockstep.launcher.run_folder import is_resuming
from lockstep.messages import log
from lockstep.model.generator_states import global_states
from lockstep.training.resume.compatibility import describe_run, log_continued, log_resumed
from lockstep.training.resume.last_safe_state import read_newest_state
from lockstep.training.resume.repeated_work import count_repeated_steps, measure_repeated_work
from lockstep.training.resume.run_checkpoints import RunCheckpoints, collect_objects
from lockstep.training.resume.safe_points import SafePoints
from lockstep.training.resume.script_log import OpenEpoch
from lockstep.training.resume.script_position import ScriptPosition
from lockstep.training.resume.unset_variables import explain_unset_variables
from lockstep.training.run_record import RunRecord
from lockstep.training.state import TrainingState

__all__ = ["ResumableRun"]


# It has many methods: one for each call of a script that a resumed run answers.
class ResumableRun:
    """The run of a trainer, which answers the calls of a resumed script.

    Args:
        state: The state that is saved and restored.
        settings: The description of model, optimizer and arguments.
        record: The record of the run.
        checkpoints: The checkpoints of the run; None for a trainer without them.
        stateful: The objects that are registered with the trainer, by name.
        member: This process as a member of an elastic run; None outside of one.

    Attributes:
        state, record, member: The arguments.
        has_begun: Whether the script has made its first call, or the run was resumed.
        safe_points: What happens where the script can be continued.
    """

    def __init__(
        self,
        state: TrainingState,
        settings: Mapping[str, str],
        record: RunRecord,
        checkpoints: RunCheckpoints | None,
        stateful: Mapping[str, Stateful],
        member: Membership | None,
    ) -> None:
        self.state = state
        self.record = record
        self.member = member
        self._history = state.history
        self._parallel = state.parallel
        self._checkpoints = checkpoints
        self.has_begun = False
        if checkpoints is not None:
            checkpoints.require_encodable(state.local_state())
        self._position = ScriptPosition(state, settings, checkpoints, stateful)
        self.safe_points = SafePoints(self._position, checkpoints, member)
        self._origin = find_restart_source()
        is_first = member is not None and self._origin is None and not member.is_waiting
        parallel = state.parallel
        may_lose = parallel.is_sharded and len(parallel.hosts) == 1
        if is_first and checkpoints is None and may_lose and parallel.rank == 0:
            log(
                'storage="sharded": if a rank is killed, this training begins again, because its '
                "shards are lost: pass checkpoint=ls.CheckpointConfig()"
            )
        self._position.is_state_transferred = (
            self._origin is not None and self._origin.state is not None
        )

    @property
    def resumed_from(self) -> int | None:
        """The number of steps that the training was resumed after; None if it was not."""
        return self._position.resumed_from

    @property
    def is_replaying(self) -> bool:
        """Whether the script has not yet reached the position of the interrupted one."""
        return self._position.is_replaying

    @property
    def is_inside_epoch(self) -> bool:
        """Whether the script is in the body of a loop over batches, or holds its iterator."""
        return self._position.log.is_inside_epoch

    # --- resuming -------------------------------------------------------------------------

    @property
    def is_resuming(self) -> bool:
        """Whether this process was launched to continue a training."""
        return self._origin is not None or (self._checkpoints is not None and is_resuming())

    def resume(self, place: str | Path | None) -> None:
        """Find and load a checkpoint, and answer the script's calls up to where it was saved.

        Args:
            place: The path of a checkpoint or of a run; None: this run.
        """
        if self._origin is not None:
            if not self.has_begun:
                self._continue_round(self._origin)
            if self._position.resumed_from is not None or place is None:
                return  # a script that calls resume did so in the first round
        checkpoints = self._checkpoints
        if checkpoints is None:
            raise UsageError(
                "resume() needs the folder and the objects of checkpoints: pass "
                "checkpoint=ls.CheckpointConfig()"
            )
        checkpoints.select(place)
        differences: list[str] = []
        steps = 0
        epochs = 0
        backlog = list[Any]()
        try:
            path = checkpoints.find(place)
            if path is not None:
                state = checkpoints.read(path, self.state.find_rows())
                differences = self._position.load(state)
                checkpoints.set_aside_newer(path, state["steps"])
                steps = state["steps"]
                epochs = state["history"]["epochs"]
                backlog = state.get("backlog", []) if place is None else []
        except LockstepError:
            checkpoints.deselect()
            raise
        self._position.resumed_from = steps
        checkpoints.open_loggers()
        if self._parallel.rank == 0:
            log_resumed(path, steps, differences)
            self._history.write_missing(backlog)
        self._history.write(
            "resume",
            step=steps,
            epochs=epochs,
            checkpoint=None if path is None else str(path),
            differences=differences,
            **describe_run(self.state),
        )
        self._position.continue_from_here()

    def replay_from(self, path: Path, stateful: Mapping[str, Stateful]) -> None:
        """Answer the script's calls up to a checkpoint as `resume` does, and write nothing.

        Args:
            path: The path of the checkpoint.
            stateful: The registered objects, by name.
        """
        state = read_checkpoint(path)
        self._position.load(state)
        self._position.resumed_from = state["steps"]
        self._position.stateful = stateful
        self._position.continue_from_here()

    def _continue_round(self, origin: RestartSource) -> None:
        """Continue from the state of the last round, or from the beginning if there is none."""
        checkpoints = self._checkpoints
        number = self.state.position.attempt.trainer
        rows = self.state.find_rows()
        path, state = read_newest_state(origin, checkpoints, number, rows)
        steps = 0 if state is None else state["steps"]
        if state is not None:
            self._position.load(state)
            self._position.resumed_from = steps
        if checkpoints is not None:
            checkpoints.open_loggers()
        elif self._parallel.rank == 0:
            self.record.open_replaced(number)
        if self._parallel.rank == 0:
            repeated = count_repeated_steps(steps, self._history.find_run_folder())
            log_continued(origin, path, steps, repeated, checkpoints is not None)
            self._history.write_missing((state or {}).get("backlog", ()))
        if self.member is not None:
            self.record.agree_on_folder(self._parallel.group)
        self.has_begun = True
        self._position.round_line = origin.describe_round() | {
            "step": steps,
            "epochs": state["history"]["epochs"] if state is not None else 0,
            "world_size": dist.get_world_size(),
            "undone": measure_repeated_work(origin, state, self._history.find_run_folder()),
        }
        self._position.continue_from_here()

    def begin(self) -> None:
        """Begin the run with the script's first call, unless it is resumed."""
        if self.has_begun or self.join():
            return
        if self._checkpoints is not None:
            self._checkpoints.begin()
        elif self._parallel.rank == 0:
            self.record.begin()
        if self.member is not None:
            self.record.agree_on_folder(self._parallel.group)
        self.has_begun = True

    # --- members of an elastic run ----------------------------------------------------------

    def join(self) -> bool:
        """Join a running elastic run if this process is a newcomer; return whether it is one."""
        member = self.member
        if member is None or not member.is_waiting:
            return False
        member.join()
        self.has_begun = True
        self._position.has_joined = True
        self._position.continue_from_here()
        return True

    def is_caught_up(self, epoch: OpenEpoch) -> bool:
        """Return whether a newcomer continues this iteration in the middle, where all others are.

        The others have already compared the data and reached the safe point before its first batch.
        """
        return self._position.has_joined and epoch.resumed is not None

    def promote(self, loggers: Any) -> None:
        """Replace the lost rank 0: continue the record, and save checkpoints."""
        self.record.take_over(loggers)
        if self._checkpoints is not None:
            self._checkpoints.promote()

    def collect_state(self) -> dict[str, Any]:
        """Return the state from which a newcomer continues; called at a safe point."""
        state = self._position.describe() | self.state.local_state()
        state |= {"folder": self.record.agreed, "resumed_from": self._position.resumed_from}
        state |= {"saved": (self.safe_points.saves, self._position.saved), "is_in_memory": True}
        state["generators"] = global_states(self._parallel.device)
        state["stateful"] = collect_objects(self._position.stateful)
        state["plans"] = None if self._checkpoints is None else self._checkpoints.plans
        return state

    def receive_state(self, state: dict[str, Any]) -> None:
        """Continue from a state that `collect_state` returned on another rank."""
        self._position.load(state)
        self._position.resumed_from = state["resumed_from"]
        self.record.agreed = state["folder"]
        folder, name = self.record.agreed
        self.safe_points.saves, self._position.saved = state["saved"]
        if self._checkpoints is not None:
            self._checkpoints.adopt(Path(folder), name, state["plans"])

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
        answer = self._position.log.answer(kind, **asked)
        if answer is not None:
            self._position.note_answer(answer["steps"])
            self.safe_points.note_call()
            return answer["result"]
        result = call()
        self._position.log.record(kind, self._position.steps, result=result, **asked)
        self.safe_points.reach(ask=ask)
        return result

    def evaluate(self, batches: EpochBatches, call: Callable[[], Any], *, ema: bool) -> Any:
        """Evaluate, or return the result of the interrupted run."""
        self.begin()
        samples = batches.state_dict()["samples"]
        return self.call("evaluation", call, ask=True, samples=samples, ema=ema)

    def begin_prediction(self) -> None:
        """Begin a prediction; UsageError if the script is not where the weights belong."""
        self.begin()
        if self._position.is_replaying:
            raise UsageError(
                "predict() before the place where the run was interrupted: the weights of "
                "that time are not kept; write `if not trainer.is_replaying:` before the call"
            )

    def call_step(self, batch: Any, step: Callable[[Any], float]) -> float:
        """Take a step, or return its loss in the interrupted run; `batch` may be of any origin."""
        if not self.has_begun:
            self.begin()
        log = self._position.log
        was_resumed = self._position.resumed_from is not None
        is_logged = self.safe_points.is_logged or (was_resumed and log.is_replaying)
        if not is_logged or log.is_inside_epoch:
            return step(batch)
        is_loaded = isinstance(batch, Batch)
        identity = batch.identity.pack() if is_loaded else str(hash_content(batch))
        self._position.train_longer()
        answer = self._position.log.answer_step(identity)
        if answer is not None:
            loss, steps = answer
            epoch = self.state.position.epoch
            self._history.last = StepResult(steps - 1, epoch, loss, 0, {}, math.nan)
            self._position.note_answer(steps)
            return loss
        loss = step(batch)
        self._position.log.record_step(self._position.steps, loss, identity)
        self.safe_points.reach(is_step=True)
        return loss

    def call_digest(self, name: str, digest: Callable[[], str]) -> str:
        """Return the current digest, or the digest of the interrupted run at this place.

        Raises:
            UsageError: The interrupted run did not compute it here.
        """
        self.join()
        steps = self._position.steps
        try:
            value = self._position.log.answer_digest(name, steps) or digest()
        except UsageError:
            if self._origin is None and not self._position.has_joined:
                raise
            log(
                f"the {name}() of an earlier step is known only to a process that was "
                f"lost: this is the one after {self.resumed_from} steps; write "
                "`if not trainer.is_replaying:` before the call"
            )
            return digest()
        self._position.log.record_digest(name, value, steps)
        self.safe_points.note()
        return value

    def require_repeatable_step(self) -> None:
        """Raise UsageError for a manual step that a resumed script would have to repeat."""
        self.begin()
        self._position.train_longer()
        if self._position.is_replaying:
            raise UsageError(
                "a resumed script cannot repeat trainer.manual_step() outside of a loop over "
                "trainer.batches(...): take its batches from there"
            )

    def begin_epoch(
        self, batches: EpochBatches, load_content: Callable[[], Sequence[str]]
    ) -> OpenEpoch | None:
        """Begin an iteration over batches; return None if the interrupted run completed it.

        Args:
            batches: The batches.
            load_content: A function that loads the first batch, and describes some of its samples.
        """
        self._position.train_longer()
        epoch, entry = self._position.log.begin_epoch(batches)
        is_first = self._history.last is None and self._origin is None
        if entry is not None and is_first and not self._position.has_joined:
            pairs = zip(entry["state"].get("content", ()), load_content(), strict=False)
            if any(saved != here for saved, here in pairs):
                message = f"samples of epoch {batches.epoch} are not those of the interrupted run"
                self._history.write("warning", rank=self._parallel.rank, message=message)
                if self._parallel.rank == 0:
                    log(message)
        if epoch is None:
            assert entry is not None, "only an iteration that was complete has an answer"
            self._history.set_last(entry.get("last"))
            explain_unset_variables(entry["epoch"])
            self._position.note_answer(entry["steps"])
            self.safe_points.note_call()
        elif epoch.resumed is not None:
            batches.load_state_dict(epoch.resumed)
            self._position.restore()
        if epoch is not None and self._position.log.is_outermost(epoch):
            self.safe_points.enter()
        self.safe_points.note(epoch)
        return epoch

    def yielded(self, epoch: OpenEpoch) -> None:
        """Note that the next batch is about to be trained.

        Raises:
            UsageError: The loop in which the iteration began has ended, so it is not in the log.
        """
        if self.safe_points.is_logged and not self._position.log.is_open(epoch):
            raise UsageError(
                f"the iteration over batches of epoch {epoch.batches.epoch} began inside of a loop "
                "over other batches, and continues after this loop has ended: a resumed run would "
                "begin it again; begin it in each loop, as in `for first, second in zip("
                "trainer.batches(...), trainer.batches(...)):`"
            )
        epoch.begun_at = self._position.steps
        self.safe_points.note_if_outdated(epoch)

    def trained(self, epoch: OpenEpoch) -> None:
        """Note that the script requests another batch, so the last one is completed."""
        epoch.begun_at = -1
        if self._position.log.is_outermost(epoch):
            self._position.log.complete_batches()  # also of inner iterations, such as those of zip
        self.safe_points.reach(epoch)

    def end_epoch(self, epoch: OpenEpoch) -> None:
        """End an iteration, completed or left by the script."""
        last = self._history.describe_last()
        self._position.log.end_epoch(epoch, self._position.steps, last)

    def require_finished(self) -> None:
        """Raise UsageError if the script ends before the position of the interrupted run."""
        if self._position.is_replaying:
            self._position.log.require_finished()

    def finish(self, state: str) -> FileError | UsageError | None:
        """Save the last checkpoint of a training that is done; called on every rank.

        Returns:
            On every rank, the error if it could not be saved, or if a resumed script ended before
            it reached the position of the interrupted one.
        """
        if self._checkpoints is None:
            self.begin()
        return self.safe_points.finish(state)
