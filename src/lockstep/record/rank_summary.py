"""The times and the memory of many ranks as a summary whose size does not depend on their number.

Up to `DETAILED_RANKS` ranks, a step has the times of every rank, and an epoch the memory of every
rank. Above, it has the minimum, median, maximum and mean over the ranks, and the rows of a few
ranks: the slowest ones, and those with the most memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.record.distribution import Distribution

__all__ = [
    "DETAILED_RANKS",
    "LISTED_RANKS",
    "STATISTICS",
    "Durations",
    "RankTimes",
    "RankUsage",
]

DETAILED_RANKS = 64
"""The largest number of ranks of which every one has a row in the record."""

LISTED_RANKS = 4
"""The number of ranks that a summary lists."""

STATISTICS = ("min", "median", "max", "mean")
"""The statistics of a summary, in the order of `Steps.spread`."""

MICROSECOND = 1e-6


class RankTimes(NamedTuple):
    """What one rank measured in a step.

    Attributes:
        rank: The rank.
        compute: Seconds of forward and backward.
        data: Seconds of loading the batch.
        idle: Seconds that a pipeline stage waited for its neighbors.
        memory: Peak resident memory in bytes.
    """

    rank: int
    compute: float
    data: float
    idle: float
    memory: int

    @property
    def busy(self) -> float:
        """Seconds of computing and loading."""
        return self.compute + self.data


class Durations(NamedTuple):
    """What one rank measured in a step that ended, in seconds.

    Attributes:
        arrived: The time from the beginning of the step to the exchange of the statuses.
        exchanged: The duration of the exchange.
        reduced: The duration of the reduction of the gradients.
        updated: The duration of the optimizer's step.
    """

    arrived: float
    exchanged: float
    reduced: float
    updated: float


class RankUsage(NamedTuple):
    """The times and the memory of the ranks of a contiguous range in one step.

    Attributes:
        rows: Every rank, in rank order, if the ranks are few; else the slowest ones, slowest first.
        largest: The ranks with the most memory as (bytes, rank); empty if the ranks are few.
        spread: The distributions of compute, data and busy times in microseconds, and of memory in
            bytes; empty if the ranks are few.
        latest: The largest of the seconds after which a rank was ready to exchange its status.
    """

    rows: list[RankTimes]
    largest: Sequence[tuple[int, int]] = ()
    spread: Sequence[Distribution] = ()
    latest: float = 0.0

    @classmethod
    def of(cls, row: RankTimes, ranks: int) -> RankUsage:
        """Return the usage of one rank of a step of `ranks` ranks."""
        arrival = row.compute + row.data + row.idle
        if ranks <= DETAILED_RANKS:
            return cls([row], latest=arrival)
        times = (row.compute, row.data, row.busy)
        values = [*(round(value / MICROSECOND) for value in times), row.memory]
        spread = tuple(Distribution.of([value]) for value in values)
        return cls([row], ((row.memory, row.rank),), spread, arrival)

    def merge(self, other: RankUsage) -> RankUsage:
        """Return the usage of this range and the following one."""
        rows, latest = self.rows + other.rows, max(self.latest, other.latest)
        if not self.spread:
            return RankUsage(rows, latest=latest)
        rows = sorted(rows, key=lambda row: (-row.busy, row.rank))[:LISTED_RANKS]
        largest = sorted([*self.largest, *other.largest], key=lambda pair: (-pair[0], pair[1]))
        spread = tuple(one.merge(two) for one, two in zip(self.spread, other.spread, strict=True))
        return RankUsage(rows, tuple(largest[:LISTED_RANKS]), spread, latest)

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> RankUsage:
        """Return the usage from its fields, as JSON has them."""
        rows, largest, spread, latest = packed
        return cls(
            [RankTimes(*row) for row in rows],
            tuple((size, rank) for size, rank in largest),
            tuple(Distribution.unpack(distribution) for distribution in spread),
            latest,
        )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.spread[0].size if self.spread else len(self.rows)

    # --- as fields of the record ---------------------------------------------------------------

    def compute_rows(self, durations: Durations) -> list[list[float]]:
        """Return [compute, communication, waiting, data] of every rank, in seconds.

        Ranks begin a step together, since the previous one ended with an exchange. Each rank
        reports its time for loading data and for forward and backward; its waiting time is the time
        until the last rank arrived, and the time that a pipeline stage waited for its neighbors.

        Args:
            durations: What this rank measured.

        Returns:
            The rows; empty if there are more than `DETAILED_RANKS` ranks.
        """
        return [] if self.spread else self._make_rows(durations)

    def _make_rows(self, durations: Durations) -> list[list[float]]:
        communication = self._communicate(durations)
        return [
            [row.compute + durations.updated, communication, self.latest - row.busy, row.data]
            for row in self.rows
        ]

    def _communicate(self, durations: Durations) -> float:
        """Return the seconds of communication, in which all ranks take part."""
        if self.ranks == 1:
            return 0.0
        waited = self.latest - durations.arrived
        return max(0.0, durations.exchanged - waited) + durations.reduced

    def summarize_times(self, durations: Durations) -> dict[str, Any] | None:
        """Return the summary of the rows of `compute_rows`; None if every rank has a row.

        Returns:
            "ranks", their number; "min", "median", "max" and "mean" over the ranks of each
            category; and "slowest", the rows of the slowest ranks after their numbers.
        """
        if not self.spread:
            return None
        compute, data, busy, _ = self.spread
        communication = self._communicate(durations)
        summary: dict[str, Any] = {"ranks": self.ranks}
        names = (("lowest", "highest"), ("median", "median"), ("highest", "lowest"))
        for name, (own, opposite) in zip(STATISTICS, (*names, ("mean", "mean")), strict=True):
            # Waiting is the rest of the time until the last rank arrived.
            waiting = self.latest - getattr(busy, opposite) * MICROSECOND
            summary[name] = [
                getattr(compute, own) * MICROSECOND + durations.updated,
                communication,
                max(0.0, waiting),
                getattr(data, own) * MICROSECOND,
            ]
        rows = zip(self.rows, self._make_rows(durations), strict=True)
        return summary | {"slowest": [[times.rank, *row] for times, row in rows]}

    def list_memory(self) -> list[int]:
        """Return the peak memory of every rank in bytes; empty if the ranks are many."""
        return [] if self.spread else [row.memory for row in self.rows]

    def summarize_memory(self) -> dict[str, Any] | None:
        """Return the summary of the ranks' memory in bytes; None if every rank has an entry.

        Returns:
            "ranks", their number; "min", "median" and "max" over the ranks; and "largest", pairs of
            a rank and its memory.
        """
        if not self.spread:
            return None
        memory = self.spread[-1]
        largest = [[rank, size] for size, rank in self.largest]
        values = {"min": memory.lowest, "median": memory.median, "max": memory.highest}
        return {"ranks": self.ranks, **values, "largest": largest}
