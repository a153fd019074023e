"""Waits: who waited for whom, and got how much, as a matrix.

rank   for 0      for 1          a row a rank, a column for whom it waited
0                 3.1 ms, 2 MB
1      1.2 ms, 2 MB
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.formatting import format_bytes, format_duration
from lockstep.record.columns import Column
from lockstep.record.reader import Run
from lockstep.record.recorded import timelines
from lockstep.record.recorder import PARTS
from lockstep.record.timeline import Timeline

__all__ = ["Waits", "table", "waits"]

RANKS = 16  # ranks listed at most


@dataclass(frozen=True)
class Waits:
    """Means of `steps` steps: `seconds[r, s]` is how long rank r waited for rank s, and
    `octets[r, s]` what it got from it. Both [ranks, ranks].
    """

    steps: int
    seconds: Column
    octets: Column


def waits(run: Run) -> Waits | None:
    """Return who waited for whom in a run; None where nothing is known, or nobody did."""
    recorded = timelines(run)
    found = of_timelines(recorded) if recorded else of_steps(run)
    return found if found and (found.seconds.any() or found.octets.any()) else None


def of_timelines(recorded: Sequence[Timeline]) -> Waits:
    """Add up the waiting before each piece of work."""
    ranks = max(one.ranks for one in recorded)
    seconds, octets = np.zeros((ranks, ranks)), np.zeros((ranks, ranks))
    for one in recorded:
        for work in one.works:
            if work.source is not None and work.source < ranks:
                seconds[work.rank, work.source] += work.waited
                octets[work.rank, work.source] += work.octets
    return Waits(len(recorded), seconds / len(recorded), octets / len(recorded))


def of_steps(run: Run) -> Waits | None:
    """Add up the steps' waiting; in each step all waited for the rank that worked longest."""
    rows = np.nan_to_num(run.steps.ranks)
    steps, ranks = rows.shape[:2]
    if steps == 0 or ranks < 2:
        return None
    slowest = (rows[:, :, PARTS.index("compute")] + rows[:, :, PARTS.index("data")]).argmax(axis=1)
    seconds = np.zeros((ranks, ranks))
    np.add.at(seconds.T, slowest, rows[:, :, PARTS.index("waiting")])
    np.fill_diagonal(seconds, 0.0)
    return Waits(steps, seconds / steps, np.zeros((ranks, ranks)))


def table(found: Waits) -> tuple[list[str], list[list[str]]]:
    """Return the matrix as text: names of the columns, and rows that begin with their rank."""
    ranks = min(len(found.seconds), RANKS)
    names = ["rank", *(f"for rank {rank}" for rank in range(ranks))]
    rows = [
        [f"{rank}", *(cell(found, rank, source) for source in range(ranks))]
        for rank in range(ranks)
    ]
    return names, rows


def cell(found: Waits, rank: int, source: int) -> str:
    """Return how long and how much, as far as there is any."""
    seconds, octets = found.seconds[rank, source], found.octets[rank, source]
    parts = [format_duration(float(seconds))] if seconds > 0 or octets > 0 else []
    return ", ".join([*parts, *([format_bytes(float(octets))] if octets > 0 else [])])
