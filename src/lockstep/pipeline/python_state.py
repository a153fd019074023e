"""Python state: what blocks keep in attributes and other objects, beside what they return.

    one process     block 0 writes box.mask, block 2 reads it: of the same micro-batch
    stages          block 2 has another box on its rank, or (interleaved) block 0 has
                    computed another micro-batch meanwhile

An object that blocks of several stages, or the loss, refer to must therefore not change from
forward to forward: that is refused by name. What changes once, such as a table that the
first call fills, may stay.

What a stage keeps for itself it may read again in backward, in a hook or an autograd
function. By then the forward of another micro-batch may have replaced it, so a stage puts
back what it was: attributes and entries of dictionaries that forward assigns anew.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.model.side_effects import MACHINERY

__all__ = ["Assigned", "PythonState", "python_states"]

LARGEST, MOST = 1000, 20_000
"""Entries of a container, and objects of a block, beyond which nothing is looked at."""

HIDDEN = MACHINERY | {"forward"}
"""Attributes that torch, or recomputation, keeps in every module."""

ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)

MISSING = object()

Key = int | tuple[int, str]
"""An object's id; for a global name the id of the globals, and the name."""

Assigned = tuple[dict[Any, Any], Any, Any]
"""A dictionary, a key in it, and a value."""


@dataclass(frozen=True)
class GlobalName:
    """A name that functions refer to in their module."""

    scope: dict[str, Any]
    name: str


@dataclass(frozen=True)
class Holder:
    """An object with content of its own, and how a message calls it."""

    value: Any
    path: str


class PythonState:
    """The Python state of one stage.

    Args:
        holders: All objects that its blocks refer to.
        users: Of those that other stages refer to as well: the block here that does, and one
            of another stage, in words.
    """

    def __init__(self, holders: Mapping[Key, Holder], users: Mapping[Key, tuple[str, str]]) -> None:
        self._holders, self._users = dict(holders), dict(users)
        self._changes: Counter[Key] = Counter()
        self._assigned: dict[tuple[int, Any], tuple[dict[Any, Any], Any]] = {}

    def contents(self) -> dict[Key, dict[Any, Any]]:
        """Return what the objects hold now."""
        return {key: _content(holder.value) for key, holder in self._holders.items()}

    def compare(self, before: Mapping[Key, Mapping[Any, Any]], place: str) -> None:
        """Take note of what a forward changed.

        Args:
            before: The contents before the forward.
            place: Where the step is, for messages.

        Raises:
            UsageError: It changed an object that other stages refer to, not for the first time.
        """
        for key, after in self.contents().items():
            changed = _changed(before[key], after)
            if not changed:
                continue
            holder = self._holders[key]
            self._changes[key] += 1
            if key in self._users and self._changes[key] > 1:
                here, elsewhere = self._users[key]
                raise UsageError(
                    f"{place}: {here} changes {_named(holder, changed[0])}, which {elsewhere} in "
                    "another stage refers to as well; stages lie on other ranks, or compute other "
                    "micro-batches meanwhile, so let blocks return what later ones need, in a "
                    "tuple with the rest"
                )
            if key not in self._users and (scope := _scope(holder.value)) is not None:
                self._assigned |= {(id(scope), name): (scope, name) for name in changed}

    def blame(self, error: AttributeError, place: str) -> UsageError | None:
        """Return the error to raise where a block misses what another stage may have written."""
        users = self._users.get(id(error.obj))
        if users is None:
            return None
        here, elsewhere = users
        missed = f"{self._holders[id(error.obj)].path}.{error.name}"
        return UsageError(
            f"{place}: {here} misses {missed}, of an object that {elsewhere} in another stage "
            "refers to as well; stages do not see each other's objects, so let blocks return "
            "what later ones need, in a tuple with the rest"
        )

    def assigned(self) -> list[Assigned]:
        """Return what is kept now where forward assigns anew."""
        return [(scope, name, scope.get(name, MISSING)) for scope, name in self._assigned.values()]

    @contextmanager
    def put_back(self, entries: Sequence[Assigned]) -> Iterator[None]:
        """Let the body find what `assigned` returned; what it assigns itself stays."""
        current = [(scope, name, scope.get(name, MISSING)) for scope, name, _ in entries]
        _put(entries)
        try:
            yield
        finally:
            kept = zip(entries, current, strict=True)
            _put(now for (scope, name, then), now in kept if scope.get(name, MISSING) is then)


def python_states(
    stages: Sequence[Mapping[str, nn.Module]], loss: Callable[..., Any] | None
) -> list[PythonState]:
    """Return the Python state of every stage.

    Args:
        stages: The blocks of each stage by name, on this rank or not.
        loss: The loss function, called in the last stage.
    """
    holders: list[dict[Key, Holder]] = []
    users: list[dict[Key, str]] = []
    for blocks in stages:
        roots = {
            f"block {name} ({type(block).__name__})": (name, block)
            for name, block in blocks.items()
        }
        found = {user: _reachable(block, name) for user, (name, block) in roots.items()}
        if len(holders) == len(stages) - 1 and loss is not None:
            found["the loss"] = _reachable(loss, "loss")
        backwards = list(reversed(found.items()))  # of several users the first one counts
        holders.append({key: each for _, part in backwards for key, each in part.items()})
        users.append({key: user for user, part in backwards for key in part})
    shared = Counter(key for each in holders for key in each)
    return [
        PythonState(
            holders[number],
            {
                key: (users[number][key], _other(users, number, key))
                for key in holders[number]
                if shared[key] > 1
            },
        )
        for number in range(len(stages))
    ]


def _other(users: Sequence[Mapping[Key, str]], number: int, key: Key) -> str:
    return next(each[key] for n, each in enumerate(users) if n != number and key in each)


# --- what an object refers to ----------------------------------------------------------------


def _reachable(root: Any, path: str) -> dict[Key, Holder]:
    """Return the objects with content of their own that `root` refers to, and itself."""
    found: dict[Key, Holder] = {}
    seen: set[Key] = set()
    kept: list[Any] = []  # an id is another object's once its own is gone
    pending = deque([(root, path)])
    while pending and len(seen) < MOST:
        value, path = pending.popleft()
        key = (id(value.scope), value.name) if isinstance(value, GlobalName) else id(value)
        if key in seen or isinstance(value, ATOMS):
            continue
        seen.add(key)
        kept.append(value)
        if _holds(value):
            found[key] = Holder(value, path)
        pending.extend(_references(value, path))
    return found


def _references(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Return what a value refers to directly, with how a message calls it."""
    if isinstance(value, FunctionType):
        yield from _names_of(value)
    elif isinstance(value, MethodType):
        yield from ((value.__self__, path), (value.__func__, path))
    elif isinstance(value, partial):
        yield from ((each, path) for each in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, type) and _is_users(value):
        yield from ((each, value.__name__) for each in vars(value).values() if callable(each))
        yield from ((each, each.__name__) for each in value.__bases__)
    elif isinstance(value, nn.Module):
        hooks = (*value._forward_hooks.values(), *value._forward_pre_hooks.values())
        yield from ((each, path) for each in hooks)
        yield from ((each, f"{path}.{name}") for name, each in value._modules.items())
    if _holds(value):
        content = _content(value)
        for name, each in content.items() if len(content) <= LARGEST else ():
            yield each, _named(Holder(value, path), name)
        if not isinstance(value, (type, GlobalName)) and _is_users(type(value)):
            yield type(value), type(value).__name__


def _names_of(function: FunctionType) -> Iterator[tuple[Any, str]]:
    """Return what a user's function refers to in closures and in its module."""
    if not _is_users(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield cell.cell_contents, name
        except ValueError:  # it is assigned later
            continue
    names = dict.fromkeys(_names_in(function.__code__))
    scope = function.__globals__
    for name in names:
        if name in scope and not isinstance(scope[name], ModuleType):
            yield GlobalName(scope, name), name


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)


def _is_users(definition: Any) -> bool:
    """Return whether a class or function is the user's, and no library's."""
    package = (getattr(definition, "__module__", None) or "").partition(".")[0]
    return package not in sys.stdlib_module_names and package not in ("torch", "numpy", "lockstep")


# --- what an object holds ---------------------------------------------------------------------


def _holds(value: Any) -> bool:
    """Return whether an object has content that may change."""
    if isinstance(value, nn.Parameter):
        return False
    if isinstance(value, type):
        return _is_users(value)
    known = (
        nn.Module, GlobalName, dict, list, tuple, set, deque, torch.Tensor, torch.Generator,
        numpy.ndarray, SimpleNamespace,
    )  # fmt: skip
    return isinstance(value, known) or (hasattr(value, "__dict__") and _is_users(type(value)))


def _content(value: Any) -> dict[Any, Any]:
    """Return what an object holds, by name or position."""
    if (scope := _scope(value)) is not None:
        hidden = HIDDEN if isinstance(value, nn.Module) else ()
        return {name: each for name, each in scope.items() if name not in hidden}
    if isinstance(value, GlobalName):
        return {value.name: value.scope.get(value.name, MISSING)}
    if isinstance(value, type):
        own = {name: each for name, each in vars(value).items() if not name.startswith("__")}
        return {name: each for name, each in own.items() if not callable(each)}
    if isinstance(value, torch.Tensor):
        return {"": 0 if value.is_inference() else value._version}
    if isinstance(value, torch.Generator):
        return {"": bytes(value.get_state().numpy())}
    if isinstance(value, numpy.ndarray):
        return {"": value.tobytes() if value.nbytes <= LARGEST * 8 else b""}
    return dict(enumerate(value)) if len(value) <= LARGEST else {"": len(value)}


def _scope(value: Any) -> dict[Any, Any] | None:
    """Return the dictionary that holds an object's attributes or entries."""
    if isinstance(value, dict):
        return value if len(value) <= LARGEST else None
    if isinstance(value, (type, GlobalName, torch.Tensor, torch.Generator, numpy.ndarray)):
        return None
    if isinstance(value, (list, tuple, set, deque)):
        return None
    attributes: dict[str, Any] = vars(value)
    return attributes


def _changed(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> list[Any]:
    """Return the names under which something else is held than before."""
    names = dict.fromkeys((*before, *after))
    return [n for n in names if not _is_same(before.get(n, MISSING), after.get(n, MISSING))]


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return alike and not one.is_meta and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if type(one) in (tuple, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, ATOMS) and bool(one == other)


def _named(holder: Holder, name: Any) -> str:
    """Return how a message calls what an object holds under a name."""
    value, path = holder.value, holder.path
    if isinstance(value, GlobalName) or name == "":
        return path
    attribute = isinstance(value, type) or (
        not isinstance(value, dict) and hasattr(value, "__dict__")
    )
    return f"{path}.{name}" if attribute else f"{path}[{name!r}]"


def _put(entries: Iterable[Assigned]) -> None:
    for scope, name, value in entries:
        if value is MISSING:
            scope.pop(name, None)
        else:
            scope[name] = value
