"""The stop request: SIGTERM asks the program to save a checkpoint and stop.

    Slurm, Kubernetes ── SIGTERM ──> flag ──> the step is finished ──> checkpoint ──> status 75

The other ranks learn of the request from the statuses of the next step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lockstep.launcher.failure_codes import STOPPED

__all__ = ["Finish", "StopRequest", "StoppedOnRequest", "end_call", "stopping"]

Finish = Callable[[str, str], None]
"""A function that ends a training as "done", "failed" or "stopped", with a message."""


class StoppedOnRequest(SystemExit):
    """The training stopped on request, after saving a checkpoint; the exit status is 75."""

    def __init__(self, message: str) -> None:
        super().__init__(STOPPED)
        self.message = message

    def __str__(self) -> str:
        """Return the message of the stop."""
        return self.message


@contextmanager
def stopping(finish: Finish, abandon: Callable[[], None]) -> Iterator[None]:
    """Call `end_call` with the error of the body, if there is one."""
    try:
        yield
    except BaseException as error:
        end_call(error, finish, abandon)
        raise


def end_call(error: BaseException, finish: Finish, abandon: Callable[[], None]) -> None:
    """Finish the training as stopped if a call was stopped on request.

    If the call failed, abandon the checkpoint that is being written.
    """
    if isinstance(error, StoppedOnRequest):
        finish("stopped", str(error))
    elif isinstance(error, Exception):  # the state that was copied before is not trusted
        abandon()


class StopRequest:
    """A handler that notes SIGTERM from `listen` to `close`; a second SIGTERM ends the process.

    A process that a launcher started ignores the second signal: launchers pass on a signal that
    systemd or srun also send to every process, and they end ranks that take too long.

    If the program has a handler for SIGTERM, it stays in place. Outside the main thread nothing
    happens. Forked children, such as loader workers, keep their default.
    """

    def __init__(self) -> None:
        self.signal = ""
        """The name of the signal that was received, or ""."""
        self._owner = os.getpid()
        self._before: Any = None

    def listen(self) -> None:
        """Begin to note the signal."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._note)

    def close(self) -> None:
        """Restore the handler, except in a rank that is about to exit because of the signal.

        Its launcher may pass the signal on only now.
        """
        if self._before is not None and os.getpid() == self._owner:
            if not self.signal or "RANK" not in os.environ:
                signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_repeated = bool(self.signal) and "RANK" not in os.environ
        if is_repeated or os.getpid() != self._owner:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.signal = signal.Signals(number).name
