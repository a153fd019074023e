"""The processor cores of a computation."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

__all__ = ["find_core", "on_another_core", "on_core", "one_thread"]


def find_core() -> int:
    """Return the processor core on which this thread runs; -1 if the system does not say."""
    try:
        return int(ctypes.CDLL(None).sched_getcpu())
    except (OSError, AttributeError):
        return -1


def on_another_core() -> AbstractContextManager[None]:
    """Run the body on another core than the present one, if this thread may use one."""
    return _on_some(lambda allowed: allowed - {find_core()})


def on_core(core: int) -> AbstractContextManager[None]:
    """Run the body on a core, if this thread may use it."""
    return _on_some(lambda allowed: allowed & {core})


@contextmanager
def _on_some(choose: Callable[[set[int]], set[int]]) -> Iterator[None]:
    if not hasattr(os, "sched_getaffinity"):  # such as on macOS
        yield
        return
    allowed = os.sched_getaffinity(0)
    if chosen := choose(allowed):
        os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one intra-op thread in the body, as torch's loader workers do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
