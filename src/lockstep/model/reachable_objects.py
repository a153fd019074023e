"""The objects with mutable content that code refers to, found from an object or from a frame."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy
import torch
from torch import nn

from lockstep.data.generators import generator_state, is_private_generator
from lockstep.model.description import MACHINERY

__all__ = [
    "ATOMS",
    "MISSING",
    "GlobalName",
    "Holder",
    "ObjectKey",
    "describe_entry",
    "find_reachable",
    "find_reachable_from_frame",
    "get_content",
    "get_names",
    "get_scope",
]

LARGEST = 1000
MOST = 20_000
"""The maximum number of entries of a container and of objects of a block that are inspected."""

HIDDEN = MACHINERY | {"forward", "_compiled_call_impl"}  # replaced while a step is computed
"""Attributes that torch or activation checkpointing keeps in every module."""

ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)

MISSING = object()

ObjectKey = int | tuple[int, str]
"""The id of an object; for a global name, the id of the globals and the name."""


@dataclass(frozen=True)
class GlobalName:
    """A global name that a function refers to."""

    scope: dict[str, Any]
    name: str


@dataclass(frozen=True)
class Holder:
    """An object with mutable content, and its name in messages."""

    value: Any
    path: str


def find_reachable_from_frame(
    frame: FrameType, skip: Iterable[Any] = (), most: int = MOST
) -> list[Holder]:
    """Return the objects with mutable content that running code refers to by its names.

    Args:
        frame: The frame of the code.
        skip: Objects that are left out, with what only they refer to.
        most: The number of objects that are looked at.
    """
    names = dict.fromkeys(_iterate_code_names(frame.f_code))
    scope = frame.f_globals
    roots = [(value, name) for name, value in frame.f_locals.items()]
    roots += [(GlobalName(scope, name), name) for name in names if name in scope]
    return list(_find_reachable_from(roots, skip, most).values())


# --- what an object refers to ----------------------------------------------------------------


def find_reachable(root: Any, path: str, skip: Iterable[Any] = ()) -> dict[ObjectKey, Holder]:
    """Return the objects with mutable content that `root` refers to, including itself."""
    return _find_reachable_from([(root, path)], skip)


def _find_reachable_from(
    roots: Iterable[tuple[Any, str]], skip: Iterable[Any], most: int = MOST
) -> dict[ObjectKey, Holder]:
    holders: dict[ObjectKey, Holder] = {}
    seen: set[ObjectKey] = {id(skipped) for skipped in skip}
    most = most + len(seen)
    kept: list[Any] = []  # keeps the objects alive, so that no id is reused
    pending = deque(roots)
    while pending and len(seen) < most:
        value, path = pending.popleft()
        key = (id(value.scope), value.name) if isinstance(value, GlobalName) else id(value)
        if key in seen or isinstance(value, ATOMS):
            continue
        seen.add(key)
        kept.append(value)
        if _has_content(value):
            holders[key] = Holder(value, path)
        pending.extend(_iterate_references(value, path))
    return holders


def _iterate_references(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Return the objects that a value refers to directly, with their names in messages."""
    if isinstance(value, FunctionType):
        yield from _iterate_names(value)
    elif isinstance(value, MethodType):
        yield from ((value.__self__, path), (value.__func__, path))
    elif isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, ModuleType):
        yield value.__self__, path
    elif isinstance(value, partial):
        yield from ((part, path) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, type) and _is_user_defined(value):
        yield from ((part, value.__name__) for part in vars(value).values() if callable(part))
        yield from ((part, part.__name__) for part in value.__bases__)
    elif isinstance(value, nn.Module):
        hooks = (*value._forward_hooks.values(), *value._forward_pre_hooks.values())
        yield from ((part, path) for part in hooks)
        yield from ((part, f"{path}.{name}") for name, part in value._modules.items())
    if _has_content(value):
        content = get_content(value)
        for name, part in content.items() if len(content) <= LARGEST else ():
            yield part, describe_entry(Holder(value, path), name)
        if not isinstance(value, (type, GlobalName)) and _is_user_defined(type(value)):
            yield type(value), type(value).__name__


def _iterate_names(function: FunctionType) -> Iterator[tuple[Any, str]]:
    """Return the objects that a user's function refers to in closures and globals."""
    if not _is_user_defined(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield cell, name
    names = dict.fromkeys(_iterate_code_names(function.__code__))
    scope = function.__globals__
    for name in names:
        if name in scope and not isinstance(scope[name], ModuleType):
            yield GlobalName(scope, name), name


def _iterate_code_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iterate_code_names(constant)


def _is_user_defined(definition: Any) -> bool:
    """Return whether a class or function is defined by the user and not by a library."""
    package = (getattr(definition, "__module__", None) or "").partition(".")[0]
    return package not in sys.stdlib_module_names and package not in ("torch", "numpy", "lockstep")


# --- the content of an object -----------------------------------------------------------------


def _has_content(value: Any) -> bool:
    """Return whether an object has mutable content."""
    if isinstance(value, nn.Parameter):
        return False
    if isinstance(value, type):
        return _is_user_defined(value)
    known = (
        nn.Module, GlobalName, dict, list, tuple, set, deque, torch.Tensor, torch.Generator,
        numpy.ndarray, SimpleNamespace, count, CellType,
    )  # fmt: skip
    if isinstance(value, known) or is_private_generator(value):
        return True
    return hasattr(value, "__dict__") and _is_user_defined(type(value))


def get_content(value: Any) -> dict[Any, Any]:
    """Return the content of an object, by name or position."""
    if (scope := get_scope(value)) is not None:
        hidden = HIDDEN if isinstance(value, nn.Module) else ()
        # Not by the methods of a subclass: that of transformers' lazy mappings imports all models.
        items = dict.items(scope) if isinstance(scope, dict) else scope.items()
        return {name: entry for name, entry in items if name not in hidden}
    if isinstance(value, GlobalName):
        return {value.name: value.scope.get(value.name, MISSING)}
    if isinstance(value, CellType):
        try:
            return {"": value.cell_contents}
        except ValueError:  # it is assigned later
            return {}
    if isinstance(value, type):
        own = {name: entry for name, entry in vars(value).items() if not name.startswith("__")}
        return {name: entry for name, entry in own.items() if not callable(entry)}
    if isinstance(value, torch.Tensor):
        return {"": 0 if value.is_inference() else value._version}
    if isinstance(value, torch.Generator):
        return {"": bytes(value.get_state().numpy())}
    if is_private_generator(value):
        return {"": repr(generator_state(value))}
    if isinstance(value, count):
        return {"": repr(value)}
    if isinstance(value, numpy.ndarray):
        return {"": value.tobytes() if value.nbytes <= LARGEST * 8 else b""}
    return dict(enumerate(value)) if len(value) <= LARGEST else {"": len(value)}


def get_scope(value: Any) -> dict[Any, Any] | None:
    """Return the dictionary of an object's attributes or entries."""
    if isinstance(value, dict):
        return value if dict.__len__(value) <= LARGEST else None
    if isinstance(value, (type, GlobalName, torch.Tensor, torch.Generator, numpy.ndarray)):
        return None
    if isinstance(value, (list, tuple, set, deque, count, CellType)) or is_private_generator(value):
        return None
    attributes: dict[str, Any] = vars(value)
    return attributes


def get_names(value: Any) -> dict[str, Any] | None:
    """Return the dictionary of an object's names, or of those of a module."""
    return value.scope if isinstance(value, GlobalName) else get_scope(value)


def describe_entry(holder: Holder, name: Any) -> str:
    """Return the name of an entry of an object, for messages."""
    value = holder.value
    path = holder.path
    if isinstance(value, GlobalName) or name == "":
        return path
    attribute = isinstance(value, type) or (
        not isinstance(value, dict) and hasattr(value, "__dict__")
    )
    return f"{path}.{name}" if attribute else f"{path}[{name!r}]"
