"""Rule 6, exact sums: floats whose sum depends on no order, grouping or number of ranks.

    ranks        0: [0.1, 1e16]           1: [3.0, -1e16]
    partial sums    [1e16, 0.1]              [-1e16, 3.0]      a few floats with the same exact sum
    merged          [3.1, 5.6e-17, ...]                        the same, of both
    rounded         3.1                                        once, as `math.fsum` of all values

The tree is not needed where a sum is exact: for squares in the norm, metrics and evaluations.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

from lockstep.kernel.layout import Messages

__all__ = [
    "PartialSums",
    "add_over_ranks",
    "compute_partial_sums",
    "merge_partial_sums",
    "round_sum",
]

PartialSums = list[float]
"""A few floats with the exact sum of many, the largest first."""


def compute_partial_sums(values: Iterable[float]) -> PartialSums:
    """Return a few numbers with the same exact sum as `values`; one number if not finite."""
    remaining = list(values)
    sums: PartialSums = []
    while (value := round_sum(remaining)) != 0:
        sums.append(value)
        if not math.isfinite(value):
            return [value]
        remaining.append(-value)
    return sums


def merge_partial_sums(left: Sequence[float], right: Sequence[float]) -> PartialSums:
    """Return the partial sums of two ranges of ranks together."""
    return compute_partial_sums([*left, *right])


def add_over_ranks(
    values: Iterable[float], messages: Messages, about: str, remark: str = ""
) -> PartialSums:
    """Return the partial sums of the values of all ranks; `about` and `remark` as in `Messages`."""
    return messages.reduce(
        compute_partial_sums(values),
        merge_partial_sums,
        lambda sums: array("d", sums).tobytes(),
        lambda message: array("d", message).tolist(),
        about,
        remark,
    )


def round_sum(values: Iterable[float]) -> float:
    """Return the exact sum of values, rounded once; infinite if it is too large for float64."""
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # beyond float64, or infinities of both signs
        return sum(values)
