"""The balance of stages: the partition of measured blocks whose slowest stage is fastest.

    blocks        3   1   4   1   5        boundaries between them   1  9  1  1
    two stages  [ 3   1   4 ] [ 1   5 ]    8 + 1 and 6 + 1: the slowest takes 9

The cost of a stage is the sum of its blocks plus the boundaries on both of its sides, because
a transfer keeps both neighbors busy. Dynamic programming finds the optimum. Among partitions whose
slowest stage is equally fast, it prefers the more even one, with the smaller sum of squared costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

__all__ = ["make_ranges", "partition_blocks"]

Part = tuple[float, float, tuple[int, ...]]
"""A partition: the cost of its slowest stage, the sum of the squared costs, the stops."""


def partition_blocks(
    blocks: Sequence[float], boundaries: Sequence[float], stages: int
) -> tuple[range, ...]:
    """Partition blocks into contiguous, non-empty stages; takes O(len(blocks)^2 * stages).

    Args:
        blocks: The cost of each block.
        boundaries: The cost of each transfer between the blocks b and b + 1, which counts for the
            stages on both sides.
        stages: The number of stages, at most that of the blocks.
    """
    sums = [0.0, *accumulate(blocks)]
    crossing = [0.0, *boundaries, 0.0]

    def add_stage(part: Part, hi: int) -> Part:
        slowest, squares, stops = part
        lo = stops[-1] if stops else 0
        cost = sums[hi] - sums[lo] + crossing[lo] + crossing[hi]
        return max(slowest, cost), squares + cost**2, (*stops, hi)

    # The best partition of the first `hi` blocks, for each `hi`.
    best: dict[int, Part] = {0: (0.0, 0.0, ())}
    for _ in range(stages):
        best = {
            hi: min(add_stage(part, hi) for lo, part in best.items() if lo < hi)
            for hi in range(min(best) + 1, len(blocks) + 1)
        }
    stops = best[len(blocks)][-1]
    return make_ranges([hi - lo for lo, hi in pairwise((0, *stops))])


def make_ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    """Return the contiguous ranges with the given sizes."""
    stops = accumulate(sizes)
    return tuple(range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True))
