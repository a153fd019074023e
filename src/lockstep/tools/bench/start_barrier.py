"""A barrier over shared memory, from which all ranks start within a microsecond."""

from __future__ import annotations

import mmap
import os
import time

from lockstep.processor_core import count_usable_cores

__all__ = ["StartBarrier"]

STRIDE = 16  # 64-bit words: two cache lines, because processors prefetch them in pairs
SPINS = 2000  # polls before the core is yielded
POLLS_PER_CLOCK = 20_000  # polls between two reads of the clock


class StartBarrier:
    """A barrier over shared memory, one instance per rank.

    Args:
        path: The file that `prepare` created.
        rank: The rank of this process.
        ranks: The number of ranks.
        timeout: The longest wait in seconds, after which `wait` raises TimeoutError and names a
            missing rank.
    """

    def __init__(self, path: str, rank: int, ranks: int, timeout: float) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ranks * STRIDE * 8)
        self._arrivals = memoryview(self._memory).cast("Q")
        self._rank = rank
        self._others = [other * STRIDE for other in range(ranks) if other != rank]
        self._timeout = timeout
        self._spins = SPINS if ranks <= count_usable_cores() else 0
        self._count = 0

    @staticmethod
    def prepare(path: str, ranks: int) -> None:
        """Create the shared file for `ranks` ranks."""
        with open(path, "xb") as file:
            file.truncate(ranks * STRIDE * 8)

    def wait(self) -> None:
        """Wait until every rank has called this method as often as this rank."""
        self._count += 1
        count = self._count
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
        """Wait for a rank, and yield the core to other processes between polls."""
        arrivals = self._arrivals
        polls = 0
        deadline = time.monotonic() + self._timeout
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
