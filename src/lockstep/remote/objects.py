"""Remote objects: an owner stores them, and other processes hold references to them.

Every reference has its own token. A process that passes a reference on first lends the receiver a
new token. It drops its own token when it no longer needs the reference:

    owner                        driver (token 1)              worker 2
      <── lend object, token 7, for 2 ──│
                                        │── a call with (object, token 7) ──> holds 7
      <── drop token 1 ─────────────────│
      <── drop token 7 ────────────────────────────────────────────────────────│

An object exists until its last token is dropped. A token may be dropped before its owner
learns that it was lent, because the two messages take different connections. The owner remembers
such early drops by their tokens; a reference count could not distinguish them.

    ref.method(1, 2)          call a method there and return the value
    ref.method.start(1, 2)    call a method there and return a Future at once
    ref(1), ref.start(1)      call the object itself, a function or a module
    ref.get("name")           an attribute's value; ref.get() a copy of the object itself
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.kernel.errors import UsageError
from lockstep.remote.future import Future

__all__ = ["ObjectAddress", "ObjectStore", "RemoteMethod", "RemoteObject", "TokenCounter"]


@dataclass(frozen=True)
class ObjectAddress:
    """One reference: object `number` of the process `owner` (a rank), held under `token`."""

    owner: int
    number: int
    token: int
    name: str = "an object"


class TokenCounter:
    """Makes tokens that are unique among all processes; the driver has rank -1."""

    def __init__(self, rank: int) -> None:
        self._next = itertools.count((rank + 1) << 40)

    def new(self) -> int:
        """Return a new token."""
        return next(self._next)


@dataclass
class StoredObject:
    """An object, and the rank that holds each token."""

    value: Any
    holders: dict[int, int] = field(default_factory=dict)


class ObjectStore:
    """The objects that one process stores for others; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._objects: dict[int, StoredObject] = {}
        self._dropped_early: set[int] = set()  # tokens that were dropped before they were lent
        self._gone: set[int] = set()  # ranks that have exited

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self._objects)

    def add(self, value: Any, token: int, holder: int) -> int:
        """Store an object for `holder` and return its number."""
        with self._lock:
            number = next(self._numbers)
            self._objects[number] = StoredObject(value, {token: holder})
            return number

    def value(self, number: int) -> Any:
        """Return an object; raise KeyError if no process holds it any more."""
        return self._objects[number].value

    def lend(self, number: int, token: int, holder: int) -> None:
        """Add a token for `holder`; the lender still holds its own."""
        with self._lock:
            if token in self._dropped_early:
                self._dropped_early.remove(token)
            elif holder not in self._gone and number in self._objects:
                self._objects[number].holders[token] = holder

    def drop(self, number: int, token: int) -> Any:
        """Drop a token; return the object if that was the last one, else None.

        The caller releases the object where its destructor may run.
        """
        with self._lock:
            stored = self._objects.get(number)
            if stored is None:
                return None
            if stored.holders.pop(token, None) is None:
                self._dropped_early.add(token)
            return None if stored.holders else self._objects.pop(number).value

    def drop_holder(self, holder: int) -> list[Any]:
        """Drop every token of a process that has exited; return objects without holders."""
        with self._lock:
            self._gone.add(holder)
            for stored in self._objects.values():
                stored.holders = {t: rank for t, rank in stored.holders.items() if rank != holder}
            free = [number for number, stored in self._objects.items() if not stored.holders]
            return [self._objects.pop(number).value for number in free]


class Caller(Protocol):
    """The way of references to the owner of their object."""

    def start(
        self,
        to: int,
        what: str,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Future[Any]:
        """Ask rank `to` to call a function, described by `what`."""

    def drop(self, address: ObjectAddress) -> None:
        """Notify the owner that a reference is gone; called in destructors."""


class RemoteObject:
    """A reference to an object of a worker; the object exists while any process holds a reference.

    You may pass it to another worker, as an argument or inside an argument. That worker then calls
    the object's owner directly. Passed to the owner, it arrives as the object itself.
    """

    __slots__ = ("_address", "_calls")

    def __init__(self, address: ObjectAddress, calls: Caller) -> None:
        self._address, self._calls = address, calls

    def get(self, name: str = "") -> Any:
        """Return the value of an attribute, such as "layer.weight", or of the object itself."""
        getter = operator.attrgetter(name) if name else get_itself
        what = f"{self._address.name}.{name}" if name else self._address.name
        return self._calls.start(self._address.owner, what, getter, (self,)).result()

    def start(self, *args: Any, **options: Any) -> Future[Any]:
        """Call the object itself and return a Future at once."""
        owner, name = self._address.owner, self._address.name
        return self._calls.start(owner, name, call_itself, (self, *args), options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the object itself and return the value."""
        return self.start(*args, **options).result()

    def __getattr__(self, name: str) -> RemoteMethod:
        """Return a method by its name."""
        if name.startswith("_"):
            raise AttributeError(f"{name}: only public methods of a remote object can be called")
        return RemoteMethod(self, name)

    def __reduce__(self) -> Any:
        """Raise UsageError: only `serialization` can pickle a reference."""
        raise UsageError(
            f"a reference to {self._address.name} can only be sent as an argument or a result of a "
            "call through the driver: otherwise its owner could not track this reference"
        )

    def __copy__(self) -> RemoteObject:
        """Return itself: a copy is the same reference."""
        return self

    def __deepcopy__(self, memo: object) -> RemoteObject:
        """Return itself: a copy is the same reference."""
        return self

    def __repr__(self) -> str:
        """Return "<Counter on rank 1>"."""
        return f"<{self._address.name} on rank {self._address.owner}>"

    def __del__(self) -> None:
        """Notify the owner that this reference is gone."""
        self._calls.drop(self._address)


class RemoteMethod:
    """A method of a remote object: call it, or `start` it."""

    __slots__ = ("_name", "_object")

    def __init__(self, thing: RemoteObject, name: str) -> None:
        self._object, self._name = thing, name

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call it where the object is and return the value."""
        return self.start(*args, **options).result()

    def start(self, *args: Any, **options: Any) -> Future[Any]:
        """Call it where the object is and return a Future at once."""
        address = self._object._address
        return self._object._calls.start(
            address.owner,
            f"{address.name}.{self._name}",
            call_method,
            (self._object, self._name, *args),
            options,
        )


# These functions run at the owner, and get the object itself instead of the reference.


def get_itself(thing: Any) -> Any:
    """Return the object."""
    return thing


def call_itself(thing: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Call the object."""
    return thing(*args, **options)


def call_method(thing: Any, name: str, /, *args: Any, **options: Any) -> Any:
    """Call a method of the object."""
    return getattr(thing, name)(*args, **options)
