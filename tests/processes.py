"""Processes that a test looks at from outside: wait for a condition; ask who lives."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


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
