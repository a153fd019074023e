"""The native module: loading it, whether this process can use it, and where its threads are."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import CodeType, FrameType, ModuleType
from typing import Any

from lockstep.comm.activity import follow_page

__all__ = [
    "ArgumentError",
    "choose_again",
    "find_compute_norms",
    "load_native",
    "reason_unavailable",
    "refusal",
    "refuse_calls",
    "where",
]

MIN_FILE_SIZE = 1 << 30
"""The least usable limit of the size of files (ulimit -f), which applies to shared memory too, in
bytes."""


class ArgumentError(ValueError, RuntimeError):
    """Invalid arguments of a collective call or message; the group is not affected.

    It is also a RuntimeError, because that is what the backends of torch raise.
    """

    __module__ = "lockstep.comm.backend"  # from where users import it


_refusal = ""  # why this process refuses calls and new groups; "" if it does not


@functools.cache
def load_native() -> ModuleType:
    """Return the native module; raise BindingError if there is none for this process."""
    from lockstep.comm.backend_errors import BackendError, PeerLostError
    from lockstep.comm.native.binding import (
        load_binding,  # here: `import torch` imports this module
    )

    native = load_binding()
    native.set_where(where)
    native.set_connect_gloo(_connect_gloo)
    native.set_error_types(argument=ArgumentError, backend=BackendError, lost=PeerLostError)
    follow_page(native.set_activity_page)
    return native


def choose_again() -> None:
    """Choose the module again when it is needed: variables that decide about it have changed."""
    load_native.cache_clear()
    reason_unavailable.cache_clear()


@functools.cache
def reason_unavailable() -> str | None:
    """Return why the backend is unavailable and what to do, or None if it is available."""
    from lockstep.comm.native.binding import BindingError

    try:
        load_native()
    except BindingError as error:
        return str(error)
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < MIN_FILE_SIZE:
        return (
            f"the limit of {limit >> 10} KiB for files also applies to shared memory: increase it "
            "(ulimit -f)"
        )
    return None


def find_compute_norms() -> Callable[[Sequence[Any]], list[float] | None] | None:
    """Return a function that returns the 2-norm of each tensor, in a fifth of torch's time.

    Returns:
        The function, whose result is None if torch has to do it; None without the native module.
    """
    if reason_unavailable() is not None:
        return None
    function: Callable[[Sequence[Any]], list[float] | None] = load_native().compute_norms
    return function


def refuse_calls(reason: str) -> None:
    """Make collective calls, messages and new groups of this process raise ArgumentError.

    A barrier in a group of one rank is always permitted.

    Args:
        reason: The end of the error message; "" permits all calls again.
    """
    global _refusal
    _refusal = reason
    if reason_unavailable() is None:
        load_native().set_refusal(reason)


def refusal() -> str:
    """Return why this process refuses calls; "" if it does not."""
    return _refusal


def _connect_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect the ranks of a host over Gloo; the native module calls this."""
    from lockstep.comm.hosts.connections import (
        connect_on_host,  # here: `import torch` imports this module
    )

    return connect_on_host(store, rank, size, timeout)


def where(thread: int) -> str:
    """Return the location of a thread in user code, such as "in train.py:31 (step)".

    The native module calls this when a wait times out or ranks disagree. Frames of torch, of
    lockstep and of the standard library are skipped if there are others.
    """
    frames = sys._current_frames()
    main = threading.main_thread().ident
    frame = frames.get(thread) or (frames.get(main) if main is not None else None)
    if frame is None:
        return ""
    code, line = _own_code(frame)
    return f"in {os.path.basename(code.co_filename)}:{line} ({code.co_name})"


def _own_code(frame: FrameType) -> tuple[CodeType, int]:
    innermost = frame
    current: FrameType | None = frame
    while current is not None:
        if not _is_foreign(current):
            return current.f_code, current.f_lineno
        current = current.f_back
    return innermost.f_code, innermost.f_lineno


def _is_foreign(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    package = name.partition(".")[0]
    return (
        package in ("torch", "lockstep", "typing_extensions") or package in sys.stdlib_module_names
    )
