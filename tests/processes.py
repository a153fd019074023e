"""Processes that a test looks at from outside, and what its own one has to restore."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from lockstep.launcher.launch_script import SIGNALS


def until(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Wait until `condition` holds; fail with `what` at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Tell whether a process is there and not only waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def restoring_handlers() -> Iterator[None]:
    """Restore the handlers of signals that a program about to exit leaves as they are."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
