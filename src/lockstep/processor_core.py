"""The processor core of a computation."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["find_core", "on_another_core"]


def find_core() -> int:
    """Return the processor core on which this thread runs; -1 if the system does not say."""
    try:
        return int(ctypes.CDLL(None).sched_getcpu())
    except (OSError, AttributeError):
        return -1


@contextmanager
def on_another_core() -> Iterator[None]:
    """Run the body on another core than the present one, if this thread may use one."""
    if not hasattr(os, "sched_getaffinity"):  # such as on macOS
        yield
        return
    allowed = os.sched_getaffinity(0)
    if others := allowed - {find_core()}:
        os.sched_setaffinity(0, others)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
