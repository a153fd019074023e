"""The times and the memory of the ranks in a step, and the times between two steps.

    end of a step ── outside ── data ── compute, idle ──> exchange of the statuses: ranks wait
                     loop, callbacks,                     for the last one
                     evaluation, saving

A step of `ls.exact` ends for its script when the gradients are complete; the optimizers that the
script calls then still belong to the step.

A line of the record has a row for each of the first `DETAILED_RANKS` ranks, so its size does not
depend on the number of ranks.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.comm.activity import Waited
from lockstep.kernel.rank_status import DETAILED_RANKS
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import StepHook

__all__ = ["RankTimes", "RankUsage", "StepUsage"]

MEMORY_INTERVAL = 0.02
"""Seconds between two readings of the peak memory, which take as long as a tiny forward pass."""


class RankTimes(NamedTuple):
    """The measurements of one rank in a step.

    Attributes:
        rank: The rank.
        compute: Seconds of forward and backward.
        data: Seconds of loading the batch.
        idle: Seconds that it waited for others before it had its status, such as for the neighbors
            of a pipeline stage or for gathered parameters.
        memory: Peak resident memory in bytes.
        outside: Seconds since the end of the previous step, without `data` and without waits for
            other ranks.
    """

    rank: int
    compute: float
    data: float
    idle: float
    memory: int
    outside: float = 0.0


class RankUsage(NamedTuple):
    """The times and the memory of the ranks of a contiguous range in one step.

    Attributes:
        rows: Those of the first `DETAILED_RANKS` ranks, in rank order.
        latest: The largest of the seconds after which a rank was ready to exchange its status,
            since the end of the previous step.
    """

    rows: list[RankTimes]
    latest: float

    @classmethod
    def of(cls, row: RankTimes) -> RankUsage:
        """Return the usage of one rank."""
        rows = [row] if row.rank < DETAILED_RANKS else []
        return cls(rows, row.outside + row.compute + row.data + row.idle)

    def merge(self, other: RankUsage) -> RankUsage:
        """Return the usage of this range and the following one."""
        return RankUsage(self.rows + other.rows, max(self.latest, other.latest))

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> RankUsage:
        """Return the usage from its fields, as JSON has them."""
        rows, latest = packed
        return cls([RankTimes(*row) for row in rows], latest)

    def compute_rows(
        self, arrived: float, exchanged: float, reduced: float, updated: float
    ) -> list[list[float]]:
        """Return [compute, communication, waiting, data] of the ranks, in seconds.

        Ranks end a step together, since it has an exchange. Each rank reports its time outside of
        steps, for loading data, and for forward and backward; its waiting time is the time until
        the last rank arrived, and the time that it waited for others before it arrived itself.

        Args:
            arrived: The time of this rank from the end of the previous step until the exchange of
                the statuses.
            exchanged: The duration of the exchange on this rank.
            reduced: The duration of the reduction of the gradients.
            updated: The duration of the optimizer's step.
        """
        waited = self.latest - arrived
        communication = max(0.0, exchanged - waited) + reduced
        rows = []
        for row in self.rows:
            waiting = self.latest - row.outside - row.compute - row.data
            rows.append([row.compute + updated, communication, waiting, row.data])
        return rows

    def list_outside(self) -> list[float]:
        """Return the seconds of the ranks between the previous step and this one."""
        return [row.outside for row in self.rows]

    def list_memory(self) -> list[int]:
        """Return the peak memory of the ranks in bytes."""
        return [row.memory for row in self.rows]


class StepUsage(StepHook):
    """The hook that measures time and memory; the result of a step gets the times of the ranks."""

    name = "usage"

    def __init__(self) -> None:
        self._peak = 0
        self._due = -math.inf
        # The end of the previous step, if the ranks of this one ended it together.
        self._ended: float | None = None
        self._ranks: tuple[int, int] | None = None
        self._waited = 0.0  # until then, in all
        self._outside = 0.0  # before the current step, with the time of loading its data
        self._before = 0.0  # the seconds of waiting until it began

    def begin(self, step: StepContext, batch: Any) -> None:
        """Measure the time since the end of the previous step, without waits for other ranks."""
        self._outside = 0.0
        self._before = Waited.seconds
        if self._ended is not None and self._ranks == (step.parallel.rank, step.parallel.replicas):
            waited = self._before - self._waited
            self._outside = time.perf_counter() - self._ended - waited
        self._ended = None

    def status(self, step: StepContext) -> RankUsage:
        """Return the usage of this rank."""
        times = step.times
        data = 0.0 if step.batch is None else step.batch.seconds
        self._outside = max(0.0, self._outside - data)
        data += times.loading
        idle = Waited.seconds - self._before
        compute = times.computed - times.begun - idle - times.loading
        if (now := time.monotonic()) >= self._due:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._peak = peak if sys.platform == "darwin" else peak * 1024
            self._due = now + MEMORY_INTERVAL
        row = step.parallel.rank, compute, data, idle, self._peak, self._outside
        return RankUsage.of(RankTimes(*row))

    def decode(self, value: Any) -> RankUsage:
        """Return the usage from its fields."""
        return RankUsage.unpack(value)

    def merge(self, left: RankUsage, right: RankUsage) -> RankUsage:
        """Return the usage of two ranges of ranks."""
        return left.merge(right)

    def measure(self, step: StepContext, value: RankUsage) -> dict[str, Any]:
        """Return the duration of the step, and the times of the ranks."""
        times = step.times
        self._ended = times.left or time.perf_counter()
        self._ranks = step.parallel.rank, step.parallel.replicas
        self._waited = times.waited if times.left else Waited.seconds
        if step.parallel.replicas * step.parallel.stages == 1:  # it waits for no other rank
            row = value.rows[0]
            compute = row.compute + times.updated - times.reduced
            data = row.data
            seconds = row.compute + row.idle + data + times.updated - times.arrived
            ranks = [[compute, 0.0, row.idle, data]]
            return {"seconds": seconds, "ranks": ranks, "outside": [row.outside]}
        arrived = times.computed - times.begun + (step.batch.seconds if step.batch else 0.0)
        rows = value.compute_rows(
            self._outside + arrived,
            times.exchanged - times.arrived,
            times.reduced - times.exchanged,
            times.updated - times.reduced,
        )
        seconds = arrived + times.updated - times.arrived
        return {"seconds": seconds, "ranks": rows, "outside": value.list_outside()}
