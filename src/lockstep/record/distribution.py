"""The distribution of a whole number over ranks, in a few numbers that can be merged exactly.

    value   0 1 ... 31 | 32,33 | 34,35 | ... | 64-67 | 68-71 | ...
    bin     0 1 ... 31 |   32  |   33  | ... |   48  |   49  | ...    16 bins per power of 2

Counts and sums are integers, so merging is associative, and the result does not depend on the shape
of the tree. The middle of a bin is within 3.2% of all its values. Times are in microseconds: those
of a step lie within a few powers of 2, so few bins are not empty, for any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["Distribution"]

BITS = 5  # significant bits of a bin's lower bound


class Distribution(NamedTuple):
    """The distribution of non-negative integers.

    Attributes:
        size: The number of values.
        total: Their sum.
        lowest: The lowest value.
        highest: The highest value.
        bins: The bins that are not empty, in order, and the number of values in each.
    """

    size: int = 0
    total: int = 0
    lowest: int = 0
    highest: int = 0
    bins: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, values: Iterable[int]) -> Distribution:
        """Return the distribution of some values; negative ones count as 0."""
        known = [max(0, value) for value in values]
        if not known:
            return cls()
        bins = tuple(sorted(Counter(map(_find_bin, known)).items()))
        return cls(len(known), sum(known), min(known), max(known), bins)

    def merge(self, other: Distribution) -> Distribution:
        """Return the distribution of the values of both."""
        if not self.size or not other.size:
            return self if self.size else other
        bins = dict(self.bins)
        for number, count in other.bins:
            bins[number] = bins.get(number, 0) + count
        return Distribution(
            self.size + other.size,
            self.total + other.total,
            min(self.lowest, other.lowest),
            max(self.highest, other.highest),
            tuple(sorted(bins.items())),
        )

    @property
    def mean(self) -> float:
        """The mean of the values; 0 if there are none."""
        return self.total / self.size if self.size else 0.0

    @property
    def median(self) -> int:
        """The median of the values, within 3.2%; 0 if there are none."""
        passed = 0
        for number, count in self.bins:
            passed += count
            if 2 * passed >= self.size:
                return self._find_middle(number)
        return 0

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Distribution:
        """Return the distribution from its fields, as JSON has them."""
        size, total, lowest, highest, bins = packed
        return cls(size, total, lowest, highest, tuple((number, count) for number, count in bins))

    def _find_middle(self, number: int) -> int:
        shift = max(0, (number >> BITS - 1) - 1)
        low = number - (shift << BITS - 1) << shift
        return min(max(low + (1 << shift) // 2, self.lowest), self.highest)


def _find_bin(value: int) -> int:
    shift = max(0, value.bit_length() - BITS)
    return (shift << BITS - 1) + (value >> shift)
