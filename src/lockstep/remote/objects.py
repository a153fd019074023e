"""The objects that a process keeps for others, and who holds a reference to each. Pure.

Every reference has a token of its own. Whoever passes one on lends the receiver
a new token first, and drops its own afterwards:

    owner                        driver (token 1)              worker 2
      <── lend object, token 7, for 2 ──│
                                        │── a call with (object, token 7) ──> holds 7
      <── drop token 1 ─────────────────│
      <── drop token 7 ────────────────────────────────────────────────────────│

An object lives until its last token is dropped. A token may be dropped before
the owner hears that it was lent (two connections), so drops are remembered
until then; a count could not tell such a drop from another one.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Address", "Objects", "Tokens"]


@dataclass(frozen=True)
class Address:
    """One reference: object `number` at `owner` (a rank), held under `token`."""

    owner: int
    number: int
    token: int
    name: str = "an object"


class Tokens:
    """Makes tokens that no other process makes; the driver has rank -1."""

    def __init__(self, rank: int) -> None:
        self._next = itertools.count((rank + 1) << 40)

    def new(self) -> int:
        """Return one that was never used."""
        return next(self._next)


@dataclass
class Kept:
    """An object, and the rank that holds each token."""

    value: Any
    holders: dict[int, int] = field(default_factory=dict)


class Objects:
    """The objects of one process, safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._kept: dict[int, Kept] = {}
        self._early: set[int] = set()  # tokens that were dropped before they were lent
        self._gone: set[int] = set()  # ranks that hold nothing any more

    def __len__(self) -> int:
        """Return how many objects are kept."""
        return len(self._kept)

    def keep(self, value: Any, token: int, holder: int) -> int:
        """Keep an object for `holder` and return its number."""
        with self._lock:
            number = next(self._numbers)
            self._kept[number] = Kept(value, {token: holder})
            return number

    def value(self, number: int) -> Any:
        """Return an object; KeyError where nobody holds it any more."""
        return self._kept[number].value

    def lend(self, number: int, token: int, holder: int) -> None:
        """Note a further token; the lender still holds one of its own."""
        with self._lock:
            if token in self._early:
                self._early.remove(token)
            elif holder not in self._gone and number in self._kept:
                self._kept[number].holders[token] = holder

    def drop(self, number: int, token: int) -> Any:
        """Drop a token; return the object where that was the last one, else None.

        The caller lets go of it where its destructor may run.
        """
        with self._lock:
            kept = self._kept.get(number)
            if kept is None:
                return None
            if kept.holders.pop(token, None) is None:
                self._early.add(token)
            return None if kept.holders else self._kept.pop(number).value

    def forget(self, holder: int) -> list[Any]:
        """Drop every token of a process that ended; return the objects that nobody holds."""
        with self._lock:
            self._gone.add(holder)
            for kept in self._kept.values():
                kept.holders = {t: rank for t, rank in kept.holders.items() if rank != holder}
            free = [number for number, kept in self._kept.items() if not kept.holders]
            return [self._kept.pop(number).value for number in free]
