"""Signals to a program: to stop, while a body runs that has to clean up, and to say where it is.

SIGINT, SIGTERM, SIGHUP    stop
SIGUSR1                    a rank prints its stack; a launcher prints where its ranks are
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = [
    "exiting_on_sigterm",
    "ignore_requests",
    "print_stack_on_signal",
    "receiving",
    "reports_on_request",
    "take_stack_request",
]

_requests: list[int] = []  # SIGUSR1, received by a launcher


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


@contextlib.contextmanager
def reports_on_request() -> Iterator[None]:
    """Note SIGUSR1 while the body runs, for `take_stack_request`."""
    unregister: Any = faulthandler.unregister  # returns whether the signal was registered
    is_main = threading.current_thread() is threading.main_thread()
    is_rank = is_main and unregister(signal.SIGUSR1)
    try:
        with receiving([signal.SIGUSR1], _requests.append):
            yield
    finally:
        if is_rank:
            print_stack_on_signal()


def take_stack_request() -> bool:
    """Return whether SIGUSR1 has asked this launcher where its ranks are since the last call."""
    has_request = bool(_requests)
    _requests.clear()
    return has_request


def print_stack_on_signal() -> None:
    """Make SIGUSR1 print the stack of this process, unless the program handles the signal.

    Its default action would end the process. `signal.getsignal` returns SIG_DFL afterwards, so that
    programs that install a handler only in place of the default one still install theirs.
    """
    before = signal.getsignal(signal.SIGUSR1)
    if before not in (signal.SIG_DFL, signal.SIG_IGN):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            if before is signal.SIG_IGN:  # by `ignore_requests`, in the fork server
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            faulthandler.register(signal.SIGUSR1, sys.__stderr__ or 2, all_threads=False)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])


def ignore_requests() -> None:
    """Ignore SIGUSR1 in a process that starts ranks for the launcher."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
