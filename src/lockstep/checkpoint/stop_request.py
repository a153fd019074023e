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

from lockstep.launcher.failure_attribution import STOPPED

__all__ = ["Finish", "StopRequest", "StoppedOnRequest", "stopping"]

Finish = Callable[[str, str], None]
"""Ends a training as "done", "failed" or "stopped", with a message."""


class StoppedOnRequest(SystemExit):
    """The training stopped on request, after saving a checkpoint; the exit status is 75."""

    def __init__(self, message: str) -> None:
        super().__init__(STOPPED)
        self.message = message

    def __str__(self) -> str:
        """Return where it stopped."""
        return self.message


@contextmanager
def stopping(finish: Finish, abandon: Callable[[], None]) -> Iterator[None]:
    """Finish the training as stopped, if the body stops on request.

    After a failure, the checkpoint that is being written is given up.
    """
    try:
        yield
    except Exception:  # of any kind: the state that was copied before it is not trusted
        abandon()
        raise
    except StoppedOnRequest as stop:
        finish("stopped", str(stop))
        raise


class StopRequest:
    """Notes SIGTERM from `listen` to `close`; a second one ends the process as usual.

    A process that a launcher started ignores the second one: launchers pass on a signal that
    systemd or srun send to every process anyway, and end ranks that take too long.

    It leaves a handler of the program's own in place, and does nothing outside the main thread.
    Forked children, such as loader workers, keep their default.
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
