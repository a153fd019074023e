"""The times and the memory of all ranks in a step."""

from __future__ import annotations

import math
import resource
import sys
import time
from typing import Any

from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import StepHook
from lockstep.record.rank_summary import Durations, RankTimes, RankUsage

__all__ = ["StepUsage"]

MEMORY_INTERVAL = 0.02
"""Seconds between two readings of the peak memory, which take as long as a tiny forward pass."""


class StepUsage(StepHook):
    """The hook that measures time and memory; the result of a step gets the times of all ranks."""

    name = "usage"

    def __init__(self) -> None:
        self._peak, self._due = 0, -math.inf

    def status(self, step: StepContext) -> RankUsage:
        """Return the usage of this rank."""
        parallel, times = step.parallel, step.times
        data = 0.0 if step.batch is None else step.batch.seconds
        compute = times.computed - times.begun - times.idle
        if (now := time.monotonic()) >= self._due:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._peak = peak if sys.platform == "darwin" else peak * 1024
            self._due = now + MEMORY_INTERVAL
        row = RankTimes(parallel.rank, compute, data, times.idle, self._peak)
        return RankUsage.of(row, parallel.replicas * parallel.stages)

    def decode(self, value: Any) -> RankUsage:
        """Return the usage from its fields."""
        return RankUsage.unpack(value)

    def merge(self, left: RankUsage, right: RankUsage) -> RankUsage:
        """Return the usage of two ranges of ranks."""
        return left.merge(right)

    def measure(self, step: StepContext, value: RankUsage) -> dict[str, Any]:
        """Return the duration of the step, and the times of the ranks."""
        times = step.times
        if step.parallel.replicas * step.parallel.stages == 1:  # it waits for no other rank
            row = value.rows[0]
            compute, data = row.compute + times.updated - times.reduced, row.data
            seconds = row.compute + row.idle + data + times.updated - times.arrived
            return {"seconds": seconds, "ranks": [[compute, 0.0, row.idle, data]]}
        arrived = times.computed - times.begun + (step.batch.seconds if step.batch else 0.0)
        durations = Durations(
            arrived,
            times.exchanged - times.arrived,
            times.reduced - times.exchanged,
            times.updated - times.reduced,
        )
        return {
            "seconds": arrived + times.updated - times.arrived,
            "ranks": value.compute_rows(durations),
            "rank_summary": value.summarize_times(durations),
        }
