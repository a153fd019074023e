"""The balance: where a chain of blocks is cut, so that its slowest stage is fastest.

    blocks        3   1   4   1   5        boundaries between them   1  9  1  1
    two stages  [ 3   1   4 ] [ 1   5 ]    8 + 1 and 6 + 1: the slowest takes 9

A stage costs what its blocks cost, plus the boundaries at which it was cut: both
neighbours are busy with a transfer. The cut is exact, by dynamic programming; of
all cuts with the fastest slowest stage it is the evenest (least sum of squares).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from lockstep.errors import LayoutError

__all__ = ["partition", "ranges"]

Cost = Callable[[int, int], float]
"""What a stage of blocks lo to hi - 1 costs."""


def partition(blocks: Sequence[float], boundaries: Sequence[float], stages: int) -> list[range]:
    """Cut blocks of the given costs into contiguous stages, none of them empty.

    `boundaries[b]` is the cost of a cut between blocks b and b + 1, paid by the stage
    on either side; an empty sequence stands for zeros. Takes some len(blocks)^2 x
    stages steps. Raises LayoutError for fewer blocks than stages, and for costs that
    are negative or no numbers.
    """
    _check(blocks, boundaries, stages)
    cost = _cost(blocks, boundaries)
    limit = max(cost(stage.start, stage.stop) for stage in _cut(len(blocks), stages, cost, max))

    def squared(lo: int, hi: int) -> float:
        return cost(lo, hi) ** 2 if cost(lo, hi) <= limit else math.inf

    return _cut(len(blocks), stages, squared, lambda left, right: left + right)


def ranges(sizes: Sequence[int]) -> list[range]:
    """Return the contiguous ranges of the given sizes: a balance written by hand."""
    stops = accumulate(sizes)
    return [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def _cost(blocks: Sequence[float], boundaries: Sequence[float]) -> Cost:
    """Return the function that gives a stage's cost, transfers included."""
    sums = [0.0, *accumulate(blocks)]
    crossing = [0.0, *(boundaries or [0.0] * (len(blocks) - 1)), 0.0]
    return lambda lo, hi: sums[hi] - sums[lo] + crossing[lo] + crossing[hi]


def _cut(
    blocks: int, stages: int, cost: Cost, join: Callable[[float, float], float]
) -> list[range]:
    """Return the cut whose stages' costs, joined, are least; of equals the first stages larger.

    best[hi] is the least for the first hi blocks in the stages so far; `starts` notes
    for each number of stages where the last of them then begins.
    """
    best = [math.inf, *(cost(0, hi) for hi in range(1, blocks + 1))]
    starts: list[list[int]] = []
    for stage in range(1, stages):
        wider = [math.inf] * (blocks + 1)
        begin = [stage] * (blocks + 1)
        for hi in range(stage + 1, blocks + 1):
            for lo in range(stage, hi):
                found = join(best[lo], cost(lo, hi))
                if found <= wider[hi]:
                    wider[hi], begin[hi] = found, lo
        best = wider
        starts.append(begin)
    bounds = [blocks]
    for begin in reversed(starts):
        bounds.append(begin[bounds[-1]])
    bounds.append(0)
    return [range(lo, hi) for hi, lo in pairwise(bounds)][::-1]


def _check(blocks: Sequence[float], boundaries: Sequence[float], stages: int) -> None:
    if not 1 <= stages <= len(blocks):
        raise LayoutError(
            f"{len(blocks)} blocks cannot be cut into {stages} stages: each has at least one block"
        )
    if boundaries and len(boundaries) != len(blocks) - 1:
        raise LayoutError(
            f"{len(blocks)} blocks have {len(blocks) - 1} boundaries, not {len(boundaries)}"
        )
    for number in (*blocks, *boundaries):
        if not (math.isfinite(number) and number >= 0):
            raise LayoutError(f"a block or boundary costs {number}; a cost is a number from 0")
