"""Start barrier: all ranks start a timed call together, on every backend.

Each rank counts its arrivals in its own cache line of a small shared file, and continues
when the counts of all other ranks have reached its own. The backend under test takes no
part.

    rank 0   | 17 |         writes its own count, reads the others
    rank 1   | 17 |
    rank 2   | 16 |  <── ranks 0 and 1 wait for rank 2
"""

from __future__ import annotations

import mmap
import os
import time

__all__ = ["StartBarrier", "usable_cores"]

STRIDE = 16  # 64-bit words: two cache lines, because processors prefetch them in pairs
SPINS = 2000  # polls before the core is yielded
POLLS_PER_CLOCK = 20_000  # polls between two reads of the clock


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class StartBarrier:
    """A barrier over shared memory, one instance per rank.

    Args:
        path: The file that `prepare` created.
        rank: The rank of this process.
        ranks: The number of ranks.
        timeout: The longest wait in seconds; then `wait` raises TimeoutError, which names a
            missing rank.
    """

    def __init__(self, path: str, rank: int, ranks: int, timeout: float) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ranks * STRIDE * 8)
        self._arrivals = memoryview(self._memory).cast("Q")
        self._rank = rank
        self._others = [other * STRIDE for other in range(ranks) if other != rank]
        self._timeout = timeout
        self._spins = SPINS if ranks <= usable_cores() else 0
        self._count = 0

    @staticmethod
    def prepare(path: str, ranks: int) -> None:
        """Create the shared file for `ranks` ranks."""
        with open(path, "xb") as file:
            file.truncate(ranks * STRIDE * 8)

    def wait(self) -> None:
        """Wait until every rank has called this as often as this rank."""
        self._count = count = self._count + 1
        arrivals = self._arrivals
        arrivals[self._rank * STRIDE] = count
        for other in self._others:
            spins = self._spins
            while arrivals[other] < count:
                if spins > 0:
                    spins -= 1
                else:
                    self._wait_yielding(other, count)
                    break

    def _wait_yielding(self, other: int, count: int) -> None:
        """Wait for a rank, and yield the core to other processes in between."""
        arrivals, polls, deadline = self._arrivals, 0, time.monotonic() + self._timeout
        while arrivals[other] < count:
            os.sched_yield()
            polls += 1
            if polls % POLLS_PER_CLOCK == 0 and time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {self._rank} waited {self._timeout:g} s at the start barrier for "
                    f"rank {other // STRIDE}"
                )

    def close(self) -> None:
        """Unmap the shared memory."""
        self._arrivals.release()
        self._memory.close()
