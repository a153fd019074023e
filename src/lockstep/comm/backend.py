"""The backend "lockstep" of `torch.distributed`, loaded when it is first used.

torch calls `register` when it is imported (entry points in pyproject.toml), so that
`dist.init_process_group("lockstep")` works without importing lockstep. Registration must not
break `import torch`: it loads nothing and raises nothing.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from types import CodeType, FrameType, ModuleType
from typing import Any

from lockstep.comm import activity

__all__ = [
    "ArgumentError",
    "available",
    "load",
    "of_group",
    "reason_unavailable",
    "refuse_calls",
    "register",
]

NAME = "lockstep"
"""The name of the backend. Do not use "cpu:lockstep": torch 2.13 then has no default backend, and
its DistributedDataParallel does not ask the backend for the memory of its buckets. torch also
confuses two custom backends in one group."""

MIN_FILE_SIZE = 1 << 30
"""The least usable limit of the size of files (ulimit -f), which applies to shared memory too, in
bytes."""


class ArgumentError(ValueError, RuntimeError):
    """Invalid arguments of a collective call or message; the group is not affected.

    It is also a RuntimeError, because that is what the backends of torch raise.
    """


_refusal = ""  # why this process refuses to create groups; "" if it does not

_forked_from: int | None = None
"""The parent process, if this one was forked while torch.distributed was initialized."""


def register() -> None:
    """Register the backend "lockstep" for CPU tensors; may be called repeatedly."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or NAME in dist.Backend.backend_list:
            return
        os.register_at_fork(after_in_child=_note_fork)
        # `devices` is a list, because torch would iterate over the letters of a string.
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    except Exception:  # an error here would break `import torch`
        return


@functools.cache
def load() -> ModuleType:
    """Return the native module; raise BindingError if there is none for this process."""
    from lockstep.native.binding import load_binding  # here: `import torch` imports this module

    native = load_binding()
    native.set_where(where)
    native.set_argument_error(ArgumentError)
    activity.follow_page(native.set_activity_page)
    return native


@functools.cache
def reason_unavailable() -> str | None:
    """Return why the backend is unavailable and what to do, or None if it is available."""
    from lockstep.native.binding import BindingError

    try:
        load()
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


def available() -> bool:
    """Return whether the backend is available."""
    return reason_unavailable() is None


def of_group(group: Any | None) -> Any | None:
    """Return the native backend of a process group, or None if it has another backend."""
    if not available():
        return None
    import torch
    import torch.distributed as dist

    found = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return found if isinstance(found, load().LockstepBackend) else None


def refuse_calls(reason: str) -> None:
    """Make collective calls, messages and new groups of this process raise ArgumentError.

    A barrier in a group of one rank is always permitted.

    Args:
        reason: The end of the error message; "" permits all calls again.
    """
    global _refusal
    _refusal = reason
    if available():
        load().set_refusal(reason)


def _note_fork() -> None:
    global _forked_from
    dist = sys.modules["torch.distributed"]
    _forked_from = os.getppid() if dist.is_initialized() else None


def _check_not_forked() -> None:
    """Raise RuntimeError in a forked process whose parent is a rank.

    A new group would use the store of the parent, and the other ranks would mistake this process
    for it.
    """
    import torch.distributed as dist

    if _forked_from is not None and dist.is_initialized():
        raise RuntimeError(
            f"rank {dist.get_rank()}: process {os.getpid()} is a fork of process {_forked_from}, "
            "where torch.distributed was initialized, and cannot create process groups: create "
            f"them in process {_forked_from}, or start the new process by spawning it"
        )


def _create(options: Any, _given: Any = None) -> Any:
    """Create the backend of this rank for a process group; called by torch."""
    _check_not_forked()
    if _refusal:
        raise ArgumentError(
            f"rank {options.group_rank}: creating group {options.group_id} is refused: {_refusal}"
        )
    reason = reason_unavailable()
    if reason is not None:
        raise RuntimeError(f"the backend 'lockstep' is unavailable (use 'gloo' instead); {reason}")
    return load().create(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout,
        name=options.group_id,
        ranks=list(options.global_ranks_in_group),
    )


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
    return package in ("torch", "lockstep") or package in sys.stdlib_module_names
