"""Thinning: a million values in a few hundred buckets, without losing a peak.

    values    . . ' . . , . . | . ' . . . . ^ . | ...        n values
    buckets   [low, mean, high] [low, mean, high] ...        at most `buckets`

A bucket keeps its lowest and highest value beside its mean, so that a spike of
one step in a million is drawn at its full height. Values that are not finite
count nowhere; a bucket without any is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Thinned", "thin"]

Column = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Thinned:
    """A curve of at most `buckets` points; `first` and `last` are a bucket's ends in x."""

    first: Column
    last: Column
    low: Column
    mean: Column
    high: Column

    @property
    def x(self) -> Column:
        """The middle of each bucket."""
        return self.first / 2 + self.last / 2

    @property
    def is_thinned(self) -> bool:
        """Whether any bucket holds more than one value."""
        return bool(np.any(self.first < self.last))

    def __len__(self) -> int:
        """Return how many points there are."""
        return len(self.first)


def thin(x: Column, y: Column, buckets: int) -> Thinned:
    """Thin the curve y(x), with x ascending, to at most `buckets` points.

    Each bucket holds equally many values (the sizes differ by at most one).
    """
    if len(x) != len(y):
        raise ValueError(f"{len(x)} places for {len(y)} values")
    if len(x) == 0:
        return Thinned(x, x, y, y, y)
    starts = np.unique(np.arange(buckets) * len(x) // buckets)
    ends = np.append(starts[1:], len(x)) - 1
    finite = np.isfinite(y)
    known = np.add.reduceat(finite, starts, dtype=np.int64)
    low = np.minimum.reduceat(np.where(finite, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, y, -np.inf), starts)
    total = np.add.reduceat(np.where(finite, y, 0.0), starts)
    empty = known == 0
    mean = np.clip(total / np.where(empty, 1, known), low, high)
    low, mean, high = (np.where(empty, np.nan, part) for part in (low, mean, high))
    return Thinned(x[starts], x[ends], low, mean, high)
