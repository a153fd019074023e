"""The end of a run, including a script that has neither `finish()` nor `with trainer:`.

    the process ends                            state
    normally                                    done
    normally, while a resumed script replays    failed, with the next call of the other run
    by an uncaught exception                    failed, with the exception
    by sys.exit(N), under Lockstep's launcher   failed, with N
    by a signal that has no handler             died: nothing is written
    because others continue an elastic run      running: nothing is written

When the process ends, other ranks may have ended already, so no collective call is made: with
pipeline stages the line has no digests, and no checkpoint is saved.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.elastic.membership import Membership
from lockstep.kernel.errors import FileError, UsageError
from lockstep.launcher.failure_codes import STOPPED
from lockstep.launcher.rank_process import fail_at_exit, get_exit_code
from lockstep.messages import log
from lockstep.record.loggers import Logger
from lockstep.record.recorder import Recorder
from lockstep.redaction import redact
from lockstep.training.resume.resumable_run import ResumableRun
from lockstep.training.state import TrainingState

__all__ = ["RunEnd"]

_unfinished: weakref.WeakSet[RunEnd] = weakref.WeakSet()
_newest: RunEnd | None = None  # kept alive: a script's function may return before exit
_owner = 0


class RunEnd:
    """The end of the run of one trainer.

    Args:
        state: The state of the trainer, with the digests and the history of the last line.
        member: This process as a member of an elastic run; None outside of one.
    """

    def __init__(self, state: TrainingState, member: Membership | None) -> None:
        self._state = state
        self._history = state.history
        # Computing a digest is then a collective call.
        self._has_parts = state.parallel.has_parts
        self._member = member
        self._run: ResumableRun | None = None
        self._is_recorded = False
        self._began = time.perf_counter()
        self._is_finished = False
        self._dropped: weakref.finalize[..., RunEnd] | None = None
        self.settle: Callable[[], None] | None = None
        """Commits the last step of a script's loop."""

    def begin(self, run: ResumableRun, is_recorded: bool) -> None:
        """Set the run, which saves the last checkpoint, and whether the last line has digests.

        `is_recorded` only matters with stages, where it must be the same on every rank. Without
        stages, each rank that has loggers writes the digests.
        """
        self._run = run
        self._is_recorded = is_recorded

    def end_at_exit(self, loggers: Sequence[Logger]) -> None:
        """End the run when the process ends, or when the trainer is garbage collected.

        The newest trainer is kept alive until the process ends, so that its last line has digests.
        """
        global _newest, _owner
        _newest = self
        _owner = os.getpid()
        _unfinished.add(self)
        self._dropped = weakref.finalize(self, _end_dropped, loggers, self._history.failure)
        self._dropped.atexit = False
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # LIFO: before the process group is destroyed

    def finish(self, state: str, message: str | None) -> None:
        """End the run on every rank.

        If the record or the last checkpoint could not be written, such as on a full disk, the
        script goes on, and the process exits with status 1 at its end.

        Raises:
            UsageError: A resumed script ended before it reached the position of the other run.
        """
        if self._is_finished or self._run is None:
            return
        self._is_finished = True
        if (failure := self._run.finish(state)) is not None:
            state = "failed"
            message = str(failure)
        recorders = [logger for logger in self._history.loggers if isinstance(logger, Recorder)]
        self._write_on_rank0(state, message)
        for recorder in recorders:
            if recorder.failure is not None and state == "done":
                failure = FileError(recorder.failure)
        if isinstance(failure, FileError):
            fail_at_exit(failure)
        elif failure is not None:
            raise failure

    def _write_on_rank0(self, state: str, message: str | None) -> None:
        """Write the last line; in an elastic run, ensure that a surviving rank 0 writes it."""
        has_digests = not self._has_parts or (self._is_recorded and state == "done")
        self._write(state, message, has_digests)
        member = self._member
        if member is None or state != "done":
            return
        before = member.round
        member.run(lambda: None, lambda _: None)
        member.permit_calls()
        if member.round != before and self._history.loggers:  # this rank is the new rank 0
            self._write(state, message, has_digests=True)

    def finish_alone(self, state: str, message: str | None) -> None:
        """End the run on this rank, without a collective call."""
        has_left = self._member is not None and self._member.has_left
        if self._is_finished or self._run is None or has_left:
            return
        if self.settle is not None:
            self.settle()
        self._is_finished = True
        self._run.safe_points.report_saved()
        if state == "done" and self._history.failure:
            state = "failed"
            message = self._history.failure["message"]
        elif state == "done":
            try:
                self._run.require_finished()
            except UsageError as error:
                state = "failed"
                message = str(error)
                if self._history.loggers:
                    log(message)
        self._write(state, message, has_digests=not self._has_parts)

    def _write(self, state: str, message: str | None, has_digests: bool) -> None:
        global _newest
        digests: dict[str, Any] = {}
        run = self._run
        is_wanted = has_digests and bool(self._history.loggers or self._has_parts)
        if is_wanted and run is not None and not run.is_replaying:
            # Ranks end one by one, so a state that the script has changed last is not read.
            names = ("digest",) if self._state.has_edits else ("digest", "optimizer_digest")
            for name in names:
                digests[name] = run.call_digest(name, getattr(self._state, name))
        self._history.close(
            state=state,
            message=message,
            **digests,
            seconds=time.perf_counter() - self._began,
            steps=self._state.position.steps,
        )
        _unfinished.discard(self)
        if self._dropped is not None:
            self._dropped.detach()
        if _newest is self:
            _newest = None


def _end_all() -> None:
    if os.getpid() != _owner:
        return  # a forked child
    state, message = _describe_exit()
    for unfinished in list(_unfinished):
        with contextlib.suppress(Exception):
            unfinished.finish_alone(state, message)


def _end_dropped(loggers: Sequence[Logger], failure: Mapping[str, Any]) -> None:
    if os.getpid() == _owner:
        for logger in loggers:
            logger.write("end", state="failed" if failure else "done", **redact(failure))
            logger.close()


def _describe_exit() -> tuple[str, str | None]:
    """Return the state of a run whose process exits now, and the message."""
    code = get_exit_code()
    error = getattr(sys, "last_value", None)
    if code == STOPPED:
        return "stopped", None
    if code not in (None, 0):
        return "failed", f"the script called sys.exit({code!r})"
    if error is None or hasattr(sys, "ps1"):  # a notebook continues after an exception
        return "done", None
    return "failed", f"{type(error).__name__}: {error}"
