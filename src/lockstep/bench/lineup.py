"""The start line: all ranks begin a timed call together, whatever is measured.

Every rank has a cache line of its own in a small shared file and writes into it
how often it came; it goes on when all others have come as often. No backend that
is measured takes part.

    rank 0   | 17 |         writes its own line, reads the others'
    rank 1   | 17 |
    rank 2   | 16 |  <── both wait for this one
"""

from __future__ import annotations

import mmap
import os
import time

__all__ = ["Lineup", "cores"]

LINE = 16  # 64-bit words: two cache lines, as processors fetch them in pairs
SPINS = 2000  # looks before the core is offered to others
LOOKS = 20_000  # looks between two looks at the clock


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Lineup:
    """One rank's place on the start line in the file at `path`; call it to wait for all.

    `patience` in seconds is the longest wait; TimeoutError names who did not come.
    """

    def __init__(self, path: str, rank: int, ranks: int, patience: float) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ranks * LINE * 8)
        self._came = memoryview(self._memory).cast("Q")
        self._rank = rank
        self._others = [other * LINE for other in range(ranks) if other != rank]
        self._patience = patience
        self._spins = SPINS if ranks <= cores() else 0
        self._turn = 0

    @staticmethod
    def prepare(path: str, ranks: int) -> None:
        """Create the file for `ranks` ranks."""
        with open(path, "xb") as file:
            file.truncate(ranks * LINE * 8)

    def __call__(self) -> None:
        """Wait until every rank has come as often as this one."""
        self._turn = turn = self._turn + 1
        came = self._came
        came[self._rank * LINE] = turn
        for other in self._others:
            spins = self._spins
            while came[other] < turn:
                if spins > 0:
                    spins -= 1
                else:
                    self._yield(other, turn)
                    break

    def _yield(self, other: int, turn: int) -> None:
        """Wait with the core offered to whoever else wants it."""
        came, looks, deadline = self._came, 0, time.monotonic() + self._patience
        while came[other] < turn:
            os.sched_yield()
            looks += 1
            if looks % LOOKS == 0 and time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {self._rank} waited {self._patience:g} s on the start line for "
                    f"rank {other // LINE}"
                )

    def close(self) -> None:
        """Let go of the shared memory."""
        self._came.release()
        self._memory.close()
