"""Calls of the script inside of a step whose results depend on the number of ranks: refused.

Each rank computes other micro-batches. What it would gather or add is that of its own part, so the
result would depend on the number of ranks, and ranks with more micro-batches would wait forever:

    a loss that gathers the embeddings of all ranks        refused, on one process too
    the trainer's own calls: gradients, stages, elastic    permitted
    next() of a second DataLoader in each micro-batch      refused: its items follow the calls

The functions of `torch.distributed` end in methods of a process group. These get a wrapper once,
which asks whether a micro-batch is being computed, and if so, whose code has made the call.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lockstep.kernel.errors import UsageError
from lockstep.kernel.rng_scopes import is_in_backward
from lockstep.model.call_site import FSDP, LOCKSTEP, TORCH, describe_line, is_code_of_user

__all__ = ["CollectiveCallGuard", "wrap_collective_calls"]

METHODS = re.compile("_?(all|barrier|broadcast|gather|monitored|recv|reduce|scatter|send)")
"""The beginnings of the names of the methods of a process group that communicate."""

FUNCTIONAL = "torch.distributed._functional_collectives"
"""The functional collectives, which call no such method from Python."""

RESOLVE = re.compile("_resolve_group(_name)?$")
"""The names of the functions that they call first."""

PLACE = "_lockstep_place"
"""The attribute of an iterator with the micro-batch that has advanced it first."""

_guards: list[CollectiveCallGuard] = []
"""The guards that are entered; those of several models need not be left in the opposite order."""

_wrapped: set[Any] = set()
"""The classes, and the names of modules, whose functions have wrappers."""


class CollectiveCallGuard:
    """A context in which collective calls and messages of the script raise UsageError.

    Args:
        place: A function that returns the rank, the step and the micro-batch, for the message; ""
            while calls are permitted.
    """

    __slots__ = ("place", "thread")

    def __init__(self, place: Callable[[], str]) -> None:
        self.place = place
        self.thread = 0

    def __enter__(self) -> None:
        """Begin to refuse calls of this thread."""
        if FUNCTIONAL in sys.modules and FUNCTIONAL not in _wrapped:
            _wrap(FUNCTIONAL, sys.modules[FUNCTIONAL], RESOLVE)
        self.thread = threading.get_ident()
        _guards.append(self)

    def __exit__(self, *error: object) -> None:
        """Permit calls again."""
        _guards.remove(self)


def wrap_collective_calls() -> None:
    """Wrap the methods of the process groups; called whenever a trainer is made."""
    for kind in type(dist.group.WORLD).__mro__:
        if issubclass(kind, dist.ProcessGroup):
            _wrap(kind, kind, METHODS)
    _wrap_data_loaders()


def _wrap(key: Any, owner: Any, names: re.Pattern[str]) -> None:
    for name, value in [*vars(owner).items()] if key not in _wrapped else ():
        if names.match(name):
            setattr(owner, name, _wrapper(name, value))
    _wrapped.add(key)


def _wrap_data_loaders() -> None:
    """Wrap the iterators of DataLoaders, to find those that several micro-batches advance."""
    kind: Any = _BaseDataLoaderIter
    if kind in _wrapped:
        return
    _wrapped.add(kind)
    advance = kind.__next__
    restart = kind._reset

    @functools.wraps(advance)
    def call(iterator: Any) -> Any:
        place = next(filter(None, (guard.place() for guard in _guards)), "")
        first = vars(iterator).setdefault(PLACE, place)
        if place and place != first and (line := _find_user_line(sys._getframe(1))):
            before = f"in {first}" if first else "outside of the micro-batches"
            raise UsageError(
                f"{place}: a DataLoader was advanced at {line}, as it was {before}; each rank "
                "computes other micro-batches, so the items that they get depend on the number of "
                "ranks: let one dataset return all that belongs to a sample, or iterate over a "
                "DataLoader as a whole"
            )
        return advance(iterator)

    @functools.wraps(restart)
    def begin_again(iterator: Any, *args: Any, **kwargs: Any) -> Any:
        vars(iterator).pop(PLACE, None)  # of an earlier iteration, with persistent workers
        return restart(iterator, *args, **kwargs)

    kind.__next__ = call
    kind._reset = begin_again


def _find_user_line(frame: FrameType | None) -> str:
    """Return the line of the script that made a call; "" if it is a call of Lockstep."""
    while frame is not None and not frame.f_code.co_filename.startswith(LOCKSTEP):
        if is_code_of_user(frame.f_code):
            return describe_line(frame)
        frame = frame.f_back
    return ""


def _wrapper(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for guard in _guards:
            _check(guard, name, sys._getframe(1))
        return function(*args, **kwargs)

    return call


def _check(guard: CollectiveCallGuard, name: str, frame: FrameType | None) -> None:
    """Raise UsageError if a micro-batch is being computed, and the script made the call."""
    if threading.get_ident() != guard.thread and not is_in_backward():
        return
    while frame is not None and not frame.f_code.co_filename.startswith(LOCKSTEP):
        code = frame.f_code
        frame_of_call = frame
        frame = frame.f_back
        if code.co_name == "wrapper":  # a decorator of torch's, or of typing_extensions
            continue
        if code.co_filename.startswith(FSDP):
            return  # the exchange of shards
        if code.co_filename.startswith(f"{TORCH}/distributed"):
            name = code.co_name
        elif is_code_of_user(code) and (place := guard.place()):
            raise UsageError(
                f"{place}: {name} was called at {describe_line(frame_of_call)}, inside of a step; "
                "each rank computes other micro-batches, so the result of a collective call "
                'depends on the number of ranks: see "Losses over the whole batch" in the guide to '
                "training"
            )
