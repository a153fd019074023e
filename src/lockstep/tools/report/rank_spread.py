"""The times and the memory of many ranks, from the summaries in the record.

A run on more than `DETAILED_RANKS` ranks has no row per rank. Its steps have the minimum, median,
maximum and mean over the ranks, and the rows of the slowest ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.record.columns import Column
from lockstep.record.format import TIME_CATEGORIES
from lockstep.record.rank_summary import STATISTICS
from lockstep.record.reader import Run

__all__ = ["ListedRank", "list_slow_ranks", "mean_times"]

BUSY = [TIME_CATEGORIES.index("compute"), TIME_CATEGORIES.index("data")]
SHOWN_RANKS = 4  # of those that are often among the slowest


@dataclass(frozen=True)
class ListedRank:
    """A rank that is among the slowest of some steps.

    Attributes:
        rank: The rank.
        times: The mean seconds of each category, over these steps.
        listed: The fraction of the steps in which it is among the slowest.
        first: The fraction of the steps in which it is the slowest.
        excess: The fraction by which it works longer than the mean of the ranks in these steps.
    """

    rank: int
    times: list[float]
    listed: float
    first: float
    excess: float

    @property
    def busy(self) -> float:
        """The mean seconds of compute and data."""
        return sum(self.times[part] for part in BUSY)


def mean_times(run: Run) -> list[float]:
    """Return the mean seconds of each category per step and rank; empty without summaries."""
    spread = run.layout_steps.spread
    if not spread.shape[1] or np.isnan(spread).all():
        return []
    return _mean(spread)[STATISTICS.index("mean")]


def _mean(spread: Column) -> list[list[float]]:
    """Return the mean over the steps; 0 where no step has a number."""
    known = np.isfinite(spread)
    total = np.where(known, spread, 0.0).sum(axis=0)
    means: list[list[float]] = (total / np.maximum(known.sum(axis=0), 1)).tolist()
    return means


def list_slow_ranks(run: Run) -> list[ListedRank]:
    """Return the ranks that are most often the slowest, and then most often among the slowest."""
    if not mean_times(run):
        return []
    slowest, spread = np.nan_to_num(run.layout_steps.slowest), run.layout_steps.spread
    means = np.nan_to_num(spread[:, STATISTICS.index("mean")][:, BUSY]).sum(axis=1)
    numbers = np.where(np.isfinite(run.layout_steps.slowest[:, :, 0]), slowest[:, :, 0], -1)
    steps = max(1, int((numbers >= 0).any(axis=1).sum()))
    listed = []
    for rank in np.unique(numbers[numbers >= 0]).tolist():
        at, row = np.nonzero(numbers == rank)
        times = slowest[at, row, 1:]
        own, usual = times[:, BUSY].sum(axis=1).mean(), means[at].mean()
        listed.append(
            ListedRank(
                rank=int(rank),
                times=times.mean(axis=0).tolist(),
                listed=len(at) / steps,
                first=int((row == 0).sum()) / steps,
                excess=float(own / usual - 1) if usual > 0 else 0.0,
            )
        )
    return sorted(listed, key=lambda one: (-one.first, -one.listed, one.rank))[:SHOWN_RANKS]
