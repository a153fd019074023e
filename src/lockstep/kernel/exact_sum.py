"""Sums of floats without rounding, which can be added in any order and grouping.

    value = mantissa * 2**exponent       an integer of any length: addition is exact

A sum is rounded once, when it is read, to the nearest float64. That is the result of `math.fsum`
over all terms, so ranks may add their terms first, and then the sums, along any tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["ExactSum", "add_exactly"]

FRACTION_BITS = 1074  # every finite float64 is a multiple of 2**-1074
INTEGER_BITS = 53


class ExactSum(NamedTuple):
    """A sum of floats: `mantissa * 2**exponent`, plus a non-finite part.

    Attributes:
        mantissa: In hexadecimal, with a sign; odd, or 0. At most about 2,100 bits.
        exponent: The power of two; 0 if the mantissa is 0.
        special: The sum of the terms that are NaN or infinite; 0.0 if there are none.
    """

    mantissa: str = "0x0"
    exponent: int = 0
    special: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> ExactSum:
        """Return the sum of some floats."""
        total, special = 0, 0.0
        for value in values:
            if math.isfinite(value):
                fraction, power = math.frexp(value)
                scaled, shift = int(math.ldexp(fraction, INTEGER_BITS)), power - INTEGER_BITS
                # a subnormal number has zeros where this shifts to the right
                place = shift + FRACTION_BITS
                total += scaled << place if place >= 0 else scaled >> -place
            else:
                special += value
        return cls._make_normal(total, -FRACTION_BITS, special)

    def __float__(self) -> float:
        """Return the sum, rounded once; infinite if it is too large for a float64."""
        if self.special != 0.0:  # true for NaN, too
            return self.special
        mantissa = int(self.mantissa, 16)
        try:
            if self.exponent < 0:
                return mantissa / (1 << -self.exponent)
            return float(mantissa << self.exponent)
        except OverflowError:
            return math.copysign(math.inf, mantissa)

    @classmethod
    def _make_normal(cls, mantissa: int, exponent: int, special: float) -> ExactSum:
        if mantissa == 0:
            return cls(special=special)
        zeros = (mantissa & -mantissa).bit_length() - 1
        return cls(hex(mantissa >> zeros), exponent + zeros, special)


def add_exactly(left: ExactSum, right: ExactSum) -> ExactSum:
    """Return the sum of two sums; associative and commutative."""
    special = left.special + right.special
    if left.mantissa == "0x0" or right.mantissa == "0x0":
        kept = right if left.mantissa == "0x0" else left
        return kept._replace(special=special)
    exponent = min(left.exponent, right.exponent)
    total = sum(int(each.mantissa, 16) << (each.exponent - exponent) for each in (left, right))
    return ExactSum._make_normal(total, exponent, special)
