"""`run`: a function on several ranks, without pytest."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]

import lockstep
from pytest_lockstep.group import join_group

__all__ = ["run"]

T = TypeVar("T")

GROUP_TIMEOUT = 60.0  # seconds by which the backend's own timeout exceeds the deadline


def run(
    fn: Callable[..., T],
    *args: Any,
    ranks: int = 2,
    backend: str = "lockstep",
    timeout: float = 60.0,
    init: bool = True,
) -> list[T]:
    """Call `fn(*args)` in ranks that have joined a group, and return their values in rank order.

    The ranks are forked from a process that has imported torch; the first call starts it.

    Args:
        fn: The function; closures and lambdas are sent too.
        args: Its arguments.
        ranks: The number of ranks.
        backend: The backend of the group.
        timeout: Deadline in seconds.
        init: Whether the ranks join the group. If not, they have torchrun's environment
            variables, and `fn` must join.

    Raises:
        lockstep.LockstepError: A rank failed, or the deadline has passed. The message names the
            first rank that failed, with its traceback as a note, or says where the ranks were.
    """
    with _send_by_value(fn):
        if not init:
            return lockstep.launch(fn, args, nprocs=ranks, timeout=timeout)
        return lockstep.launch(_call, (fn, args, backend, timeout), nprocs=ranks, timeout=timeout)


def _call(fn: Callable[..., T], args: tuple[Any, ...], backend: str, timeout: float) -> T:
    with join_group(backend, timeout + GROUP_TIMEOUT):
        return fn(*args)


@contextlib.contextmanager
def _send_by_value(fn: Callable[..., Any]) -> Iterator[None]:
    """Send a function of a test file with its code: the ranks cannot import such a file by name."""
    module = inspect.getmodule(fn)
    is_in_test = "PYTEST_CURRENT_TEST" in os.environ and module is not None
    if not is_in_test or module is sys.modules["__main__"] or _is_registered(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_registered(module: Any) -> bool:
    return module.__name__ in cloudpickle.list_registry_pickle_by_value()
