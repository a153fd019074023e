"""Requests to a launcher, by SIGUSR1, to print where its ranks are."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["reports_on_request", "take_request"]

_requested = False


def _request_report(number: int, frame: FrameType | None) -> None:
    global _requested
    _requested = True


def take_request() -> bool:
    """Return whether a report was requested since the previous call."""
    global _requested
    requested, _requested = _requested, False
    return requested


@contextlib.contextmanager
def reports_on_request() -> Iterator[None]:
    """Make SIGUSR1 to this process print where the ranks are, while it waits for them.

    A handler that the program has installed stays in effect. Does nothing outside the main thread.
    """
    before = signal.getsignal(signal.SIGUSR1)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before not in (signal.SIG_DFL, _request_report):
        yield
        return
    signal.signal(signal.SIGUSR1, _request_report)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGUSR1) is _request_report:
            signal.signal(signal.SIGUSR1, before)
