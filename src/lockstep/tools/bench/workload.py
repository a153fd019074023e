"""The measurement loop of one rank, the same for torch's backends and MPI.

    write the input ──> start barrier ──> clock ──> call ──> clock ──> next
                                                                last ──> check the output

Only the call itself is timed.

Input data are small integers in blocks of PERIOD elements that repeat over the buffer. A
block depends on the rank, on the part of the buffer and on the *variant*, which alternates
from call to call. So a call that does nothing is detected: it leaves the previous result.
The period is prime, so that a misplaced piece is wrong too. Sums are exact in any order.
"""

from __future__ import annotations

import gc
import mmap
import os
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.record.run_environment import count_usable_cores
from lockstep.tools.bench.measured_collectives import Contents, Part, find

__all__ = [
    "DTYPE",
    "ITEM_BYTES",
    "PERIOD",
    "VARIANTS",
    "Library",
    "PreparedWorkload",
    "StartBarrier",
    "UnsupportedError",
    "Values",
    "Workload",
    "expected_block",
]

PERIOD = 1009
VARIANTS = 2

Values = npt.NDArray[Any]

DTYPE, ITEM_BYTES = "float32", 4
"""The data type of all elements, and its size."""


def input_block(rank: int, part: int, variant: int) -> Values:
    """Return the block of values that `rank` writes into its part `part`."""
    index = np.arange(PERIOD)
    return (index * (3 + variant) + index // 7 + rank * 5 + part * 11) % 4


def expected_block(part: Part, ranks: int, variant: int) -> Values:
    """Return the block of values of `part`, which is a sum over the ranks if it has no rank."""
    if part.rank is not None:
        return input_block(part.rank, part.part, variant)
    blocks = [input_block(rank, part.part, variant) for rank in range(ranks)]
    total: Values = np.sum(blocks, axis=0)
    return total


class UnsupportedError(Exception):
    """A backend that cannot do what was requested; the message says why."""


@dataclass(frozen=True)
class Workload:
    """A collective on parts of `count` elements; reductions add.

    `shared_memory` puts the buffers in memory that the ranks share.
    """

    collective: str
    count: int
    shared_memory: bool = False


class Library(Protocol):
    """The tensors and calls of one library: torch, or MPI with numpy."""

    def new(self, count: int, workload: Workload) -> Any:
        """Return a buffer of `count` elements, or raise UnsupportedError."""

    def convert(self, values: Values) -> Any:
        """Return the values as float32."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy `source` into `target`, broadcast as numpy does."""

    def count_wrong(self, actual: Any, expected: Any) -> int:
        """Count the elements that differ."""

    def call(self, workload: Workload, send: Any, receive: Any) -> Callable[[], object]:
        """Return the call to measure, or raise UnsupportedError."""


class PreparedWorkload:
    """A workload with its buffers on one rank; `call` is the call to measure."""

    def __init__(self, library: Library, workload: Workload, rank: int, ranks: int) -> None:
        collective = find(workload.collective)
        before, after = collective.before(rank, ranks), collective.after(rank, ranks)
        sent, received = len(before) * workload.count, len(after) * workload.count
        if collective.is_in_place:
            send = receive = library.new(max(sent, received), workload)
        else:
            send, receive = library.new(sent, workload), library.new(received, workload)
        self.workload = workload
        self._library = library
        self._inputs = [
            split_blocks(library, send, before, workload, ranks, v) for v in range(VARIANTS)
        ]
        self._outputs = [
            split_blocks(library, receive, after, workload, ranks, v) for v in range(VARIANTS)
        ]
        self.call = library.call(workload, send, receive)

    def fill_inputs(self, variant: int) -> None:
        """Write the input of this rank."""
        for target, block in self._inputs[variant]:
            self._library.copy(target, block)

    def count_wrong(self, variant: int) -> int:
        """Count the wrong elements of the output."""
        count = self._library.count_wrong
        return sum(count(actual, block) for actual, block in self._outputs[variant])

    def time_block(self, calls: int, wait_for_start: Callable[[], None]) -> tuple[list[int], int]:
        """Time a block of calls after one warm-up call.

        Returns:
            The nanoseconds of each call, and the number of wrong elements after the last.
        """
        times = array("q", bytes(8 * (calls + 1)))
        clock, call, fill = time.perf_counter_ns, self.call, self.fill_inputs
        gc.disable()
        try:
            for turn in range(calls + 1):
                fill(turn % VARIANTS)
                wait_for_start()
                begin = clock()
                call()
                times[turn] = clock() - begin
        finally:
            gc.enable()
        return times.tolist()[1:], self.count_wrong(calls % VARIANTS)


BlockViews = list[tuple[Any, Any]]


def split_blocks(
    library: Library, buffer: Any, contents: Contents, workload: Workload, ranks: int, variant: int
) -> BlockViews:
    """Return (view of the buffer, block) pairs that cover it: whole blocks, then the rest."""
    views = []
    for number, part in enumerate(contents):
        block = library.convert(expected_block(part, ranks, variant))
        here = buffer[number * workload.count : (number + 1) * workload.count]
        whole = workload.count - workload.count % PERIOD
        if whole:
            views.append((here[:whole].reshape(-1, PERIOD), block))
        if whole < workload.count:
            views.append((here[whole:], block[: workload.count - whole]))
    return views


# --- the start barrier ---------------------------------------------------------------------------

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
        """Wait for a rank, and yield the core to other processes between polls."""
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
