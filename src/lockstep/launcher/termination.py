"""Signals that ask a program to stop, while a body runs that has to clean up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["exiting_on_sigterm", "receiving"]


@contextlib.contextmanager
def receiving(numbers: Sequence[int], receive: Callable[[int], None]) -> Iterator[dict[int, Any]]:
    """Call `receive` for signals that come while the body runs.

    A handler of the program stays in place, and a signal that is ignored stays ignored: nohup
    ignores SIGHUP. Does nothing outside the main thread.

    Args:
        numbers: The signals.
        receive: Called with the number of each signal; may raise.

    Yields:
        The handlers to restore after the body, by signal; the body may change them.
    """
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    is_main = threading.current_thread() is threading.main_thread()
    replaced = [number for number in numbers if is_main and signal.getsignal(number) in defaults]
    before: dict[int, Any] = {
        number: signal.signal(number, lambda number, frame: receive(number)) for number in replaced
    }
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """Exit at SIGTERM as at an exception in the body: nothing that it started is left behind."""

    def leave(number: int) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    with receiving([signal.SIGTERM], leave):
        yield
