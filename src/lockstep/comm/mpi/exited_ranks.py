"""Which ranks have ended, so that nobody waits for them until the timeout.

A rank of MPI that ends waits in MPI_Finalize for the others. It says so in the store of the default
group before, and the others look there while they wait.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["ExitedRanks", "exited_ranks"]

INTERVAL = 1.0  # seconds between looks at the store
GRACE = 5.0  # seconds in which MPI may still deliver what an ended rank has sent


class ExitedRanks:
    """The ranks that have ended, as far as this process knows."""

    def __init__(self) -> None:
        self._store: Any = None
        self._looked = 0.0
        self._seen: dict[int, float] = {}  # rank -> when this process saw that it has ended

    def watch(self, store: Any) -> None:
        """Use the store of the default group."""
        self._store, self._seen, self._looked = store, {}, 0.0

    def announce(self, rank: int) -> None:
        """Say that this rank has ended."""
        if self._store is not None:
            with contextlib.suppress(Exception):  # the store may have ended with rank 0
                self._store.set(f"ended/{rank}", "")
                self._store.add("ended", 1)

    def find(self, ranks: Sequence[int]) -> list[int]:
        """Return those of the ranks that ended more than `GRACE` ago; quick if called often."""
        now = time.monotonic()
        if self._store is not None and now - self._looked > INTERVAL:
            self._looked = now
            with contextlib.suppress(Exception):
                if self._store.add("ended", 0) > len(self._seen):
                    for rank in ranks:
                        if rank not in self._seen and self._store.check([f"ended/{rank}"]):
                            self._seen[rank] = now
        return [rank for rank in ranks if now - self._seen.get(rank, now) > GRACE]


exited_ranks = ExitedRanks()
