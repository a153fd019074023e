"""Python state: values that blocks keep in attributes and other objects, not in their outputs.

    one process     block 0 writes box.mask, block 2 reads that of the same micro-batch
    stages          block 2 has another box on its rank, or (interleaved) block 0 has
                    computed another micro-batch in the meantime

Therefore an object that several stages refer to, in a block or in the loss, must not change from
forward to forward; otherwise an error names it. A single change is allowed, such as a table that
the first call fills.

A stage may read its own state again in backward, in a hook or an autograd function. By then
the forward of another micro-batch may have replaced it. So a stage restores the attributes and
dictionary entries that forward assigned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from lockstep.kernel.errors import LayoutError
from lockstep.model.reachable_objects import (
    ATOMS,
    MISSING,
    Holder,
    ObjectKey,
    describe_entry,
    find_reachable,
    get_content,
    get_names,
    get_scope,
)

__all__ = [
    "Assigned",
    "PythonState",
    "find_python_state",
    "find_python_states",
]

Assigned = tuple[dict[Any, Any], Any, Any]
"""A dictionary, a key in it, and a value."""


class PythonState:
    """The Python state of one stage.

    Args:
        holders: All objects that its blocks refer to.
        users: For each object that other stages refer to as well, descriptions of two blocks
            that refer to it: one of this stage, and one of another stage.
    """

    def __init__(
        self, holders: Mapping[ObjectKey, Holder], users: Mapping[ObjectKey, tuple[str, str]]
    ) -> None:
        self._holders = dict(holders)
        self._users = dict(users)
        self._changes: Counter[ObjectKey] = Counter()
        self._assigned: dict[tuple[int, Any], tuple[dict[Any, Any], Any]] = {}
        self._shared = {key: self._holders[key].value for key in self._users}
        self._identities: list[Any] = []
        self._contents: dict[ObjectKey, dict[Any, Any]] = {}
        self.hold()

    def hold(self) -> None:
        """Take the shared objects as they are, such as at the beginning of a step."""
        identities = self._identify()
        if identities != self._identities or not self._contents:
            self._identities = identities
            self._contents = {key: get_content(value) for key, value in self._shared.items()}

    def check(self, where: str) -> None:
        """Record which of the shared objects have changed since `hold`, or the last check."""
        if self._identify() != self._identities:
            before = self._contents
            self.hold()
            self._record(before, self._contents, where)

    def _identify(self) -> list[Any]:
        """Return what differs if shared objects do; the ids of attributes and entries, mostly.

        No id is used again, because `_contents` refers to the values.
        """
        return [
            content
            for value in self._shared.values()
            for content in (
                map(id, vars(value).values())
                if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor)
                else get_content(value).values()
                if isinstance(value, (torch.Tensor, torch.Generator, numpy.ndarray))
                else map(id, get_content(value).values())
            )
        ]

    def snapshot(self) -> dict[ObjectKey, dict[Any, Any]]:
        """Return the current content of the objects."""
        return {key: get_content(holder.value) for key, holder in self._holders.items()}

    def find_view(self, released: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
        """Return the names of a tensor and of the released one whose memory it keeps, if any."""
        names = {tensor.untyped_storage().data_ptr(): name for name, tensor in released.items()}
        objects = {id(tensor) for tensor in released.values()}
        for holder in self._holders.values():
            value = holder.value
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                name = names.get(value.untyped_storage().data_ptr())
                if name is not None and id(value) not in objects:
                    return holder.path, name
        return None

    def find_change(self, before: Mapping[ObjectKey, Mapping[Any, Any]]) -> str | None:
        """Return the first entry that has changed since a snapshot; None if there is none."""
        return next(self.list_changes(before), None)

    def list_changes(self, before: Mapping[ObjectKey, Mapping[Any, Any]]) -> Iterator[str]:
        """Yield the names of all entries that have changed since a snapshot."""
        for key, after in self.snapshot().items():
            for name in _find_changes(before[key], after):
                yield describe_entry(self._holders[key], name)

    def find_assigned(self, before: Mapping[ObjectKey, Mapping[Any, Any]]) -> list[Assigned]:
        """Return the values that names had in a snapshot, of those that were assigned since."""
        values = {key: holder.value for key, holder in self._holders.items()}
        return [
            (scope, name, before[key].get(name, MISSING))
            for key, after in self.snapshot().items()
            if (scope := get_names(values[key])) is not None
            for name in _find_changes(before[key], after)
        ]

    def record_changes(self, before: Mapping[ObjectKey, Mapping[Any, Any]], where: str) -> None:
        """Record which objects a forward changed.

        Args:
            before: The snapshot before the forward.
            where: Rank, stage, step and micro-batch, for messages.

        Raises:
            LayoutError: A forward changed, for the second time, an object that other stages refer
                to.
        """
        self._record(before, self.snapshot(), where)
        self.hold()

    def _record(
        self, before: Mapping[ObjectKey, Any], contents: Mapping[ObjectKey, Any], where: str
    ) -> None:
        for key, after in contents.items():
            changed = _find_changes(before[key], after)
            if not changed:
                continue
            holder = self._holders[key]
            self._changes[key] += 1
            if key in self._users and self._changes[key] > 1:
                here, elsewhere = self._users[key]
                changed_entry = describe_entry(holder, changed[0])
                raise LayoutError(
                    f"{where}: {here} changes {changed_entry}, which {elsewhere} refers "
                    "to as well; stages are on other ranks, or compute other micro-batches in the "
                    "meantime: return what later blocks need as part of the "
                    "block's output, in a tuple"
                )
            if key not in self._users and (scope := get_scope(holder.value)) is not None:
                self._assigned |= {(id(scope), name): (scope, name) for name in changed}

    def explain_missing(self, error: AttributeError, where: str) -> LayoutError | None:
        """Return the error for an attribute that a block lacks and another stage may have set."""
        users = self._users.get(id(error.obj))
        if users is None:
            return None
        here, elsewhere = users
        missing = f"{self._holders[id(error.obj)].path}.{error.name}"
        return LayoutError(
            f"{where}: {here} lacks {missing}, of an object that {elsewhere} refers to as well; "
            "stages do not share objects: return what later blocks need as "
            "part of the block's output, in a tuple"
        )

    def get_assigned(self) -> list[Assigned]:
        """Return the current values of the names that forward assigns."""
        return [(scope, name, scope.get(name, MISSING)) for scope, name in self._assigned.values()]

    @contextmanager
    def restore_assigned(self, entries: Sequence[Assigned]) -> Iterator[None]:
        """Restore the values from `get_assigned` in the body; keep the body's own assignments."""
        current = [(scope, name, scope.get(name, MISSING)) for scope, name, _ in entries]
        _assign(entries)
        try:
            yield
        finally:
            kept = zip(entries, current, strict=True)
            _assign(now for (scope, name, then), now in kept if scope.get(name, MISSING) is then)


def find_python_state(root: nn.Module, path: str) -> PythonState:
    """Return the Python state of everything that a module refers to; `path` is its name."""
    return PythonState(find_reachable(root, path), {})


def find_python_states(
    stages: Sequence[Mapping[str, nn.Module]],
    loss: Callable[..., Any] | None,
    model: nn.Module | None = None,
) -> list[PythonState]:
    """Return the Python state of every stage.

    Args:
        stages: The blocks of each stage by name, on this rank or not.
        loss: The loss function, called in the last stage.
        model: The model, whose forward may refer to what the blocks change.
    """
    holders: list[dict[ObjectKey, Holder]] = []
    users: list[dict[ObjectKey, str]] = []
    for blocks in stages:
        roots = {
            f"block {name} ({type(block).__name__})": (name, block)
            for name, block in blocks.items()
        }
        reached_by = {user: find_reachable(block, name) for user, (name, block) in roots.items()}
        if len(holders) == len(stages) - 1 and loss is not None:
            reached_by["the loss"] = find_reachable(loss, "loss")
        backwards = list(reversed(reached_by.items()))  # the first of several users counts
        holders.append({key: holder for _, part in backwards for key, holder in part.items()})
        users.append({key: user for user, part in backwards for key in part})
    if model is not None:
        blocks_of_all = [block for blocks in stages for block in blocks.values()]
        reached = find_reachable(model, type(model).__name__, skip=blocks_of_all)
        users.append(dict.fromkeys(reached, f"the forward of {type(model).__name__}"))
    shared = Counter(key for keys in users for key in keys)
    return [
        PythonState(
            holders[number],
            {
                key: (users[number][key], _find_other_user(users, number, key))
                for key in holders[number]
                if shared[key] > 1
            },
        )
        for number in range(len(stages))
    ]


def _find_other_user(users: Sequence[Mapping[ObjectKey, str]], number: int, key: ObjectKey) -> str:
    other = next(n for n, keys in enumerate(users) if n != number and key in keys)
    user = users[other][key]
    return user if user.startswith("the forward") else f"{user} in another stage"


def _find_changes(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> list[Any]:
    """Return the names whose values differ."""
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


def _assign(entries: Iterable[Assigned]) -> None:
    for scope, name, value in entries:
        if value is MISSING:
            scope.pop(name, None)
        else:
            scope[name] = value
