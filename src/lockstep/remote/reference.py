"""References: objects that live in a worker, used from the driver or another worker.

ref.method(1, 2)          call it there, return the value
ref.method.start(1, 2)    call it there, return a Future at once
ref(1), ref.start(1)      call the object itself, a function or a module
ref.get("name")           an attribute's value; ref.get() the object's own, copied
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.errors import UsageError
from lockstep.remote.objects import Address

if TYPE_CHECKING:
    from lockstep.remote.calls import Calls
    from lockstep.remote.future import Future

__all__ = ["Method", "Remote"]


class Remote:
    """A reference to an object of a worker; the object lives while anybody holds one.

    It may be given to another worker, as an argument or within one: that worker
    then calls the object's owner directly. At its owner it is the object itself.
    """

    __slots__ = ("_address", "_calls")

    def __init__(self, address: Address, calls: Calls) -> None:
        self._address, self._calls = address, calls

    def get(self, name: str = "") -> Any:
        """Return the value of an attribute ("layer.weight" too), or of the object itself."""
        getter = operator.attrgetter(name) if name else itself
        what = f"{self._address.name}.{name}" if name else self._address.name
        return self._calls.start(self._address.owner, what, getter, (self,)).result()

    def start(self, *args: Any, **options: Any) -> Future:
        """Call the object itself and return a Future at once."""
        owner, name = self._address.owner, self._address.name
        return self._calls.start(owner, name, called, (self, *args), options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the object itself and return the value."""
        return self.start(*args, **options).result()

    def __getattr__(self, name: str) -> Method:
        """Return a method by its name."""
        if name.startswith("_"):
            raise AttributeError(f"{name}: only public methods of a remote object can be called")
        return Method(self, name)

    def __reduce__(self) -> Any:
        """Refuse to be pickled otherwise than by the packer."""
        raise UsageError(
            f"a reference to {self._address.name} travels as an argument or a result of a call "
            "through the driver, and in no other way: nobody would know who holds it"
        )

    def __copy__(self) -> Remote:
        """Return itself: a copy is the same reference."""
        return self

    def __deepcopy__(self, memo: object) -> Remote:
        """Return itself: a copy is the same reference."""
        return self

    def __repr__(self) -> str:
        """Return "<Counter on rank 1>"."""
        return f"<{self._address.name} on rank {self._address.owner}>"

    def __del__(self) -> None:
        """Tell the owner that this reference is gone."""
        self._calls.drop(self._address)


class Method:
    """A method of a remote object: call it, or `start` it."""

    __slots__ = ("_name", "_remote")

    def __init__(self, remote: Remote, name: str) -> None:
        self._remote, self._name = remote, name

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call it where the object lives and return the value."""
        return self.start(*args, **options).result()

    def start(self, *args: Any, **options: Any) -> Future:
        """Call it where the object lives and return a Future at once."""
        remote = self._remote
        return remote._calls.start(
            remote._address.owner,
            f"{remote._address.name}.{self._name}",
            method,
            (remote, self._name, *args),
            options,
        )


# What runs where the object lives, and finds the object itself in the reference's place.


def itself(thing: Any) -> Any:
    """Return the object."""
    return thing


def called(thing: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Call the object."""
    return thing(*args, **options)


def method(thing: Any, name: str, /, *args: Any, **options: Any) -> Any:
    """Call a method of the object."""
    return getattr(thing, name)(*args, **options)
