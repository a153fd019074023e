"""What ranks write before each call, and what must come out: whole numbers in short blocks.

A buffer repeats a block of PERIOD numbers that depends on the rank, on the part
of the buffer and on the *variant*, which changes from call to call: what a call
leaves undone shows as the call before. The period is a prime, so that a piece
that lands in the wrong place shows too. Numbers are small: sums are exact in
every dtype, in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.bench.collectives import Part

__all__ = ["OPS", "PERIOD", "VARIANTS", "itemsize", "numbers"]

PERIOD = 1009
VARIANTS = 2

Numbers = npt.NDArray[Any]

OPS: dict[str, Any] = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def itemsize(dtype: str) -> int:
    """Return the bytes of an element; numpy does not know bfloat16."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def written(rank: int, part: int, variant: int, op: str) -> Numbers:
    """Return the block that `rank` writes into its part `part`."""
    place = np.arange(PERIOD)
    mixed = place * (3 + variant) + place // 7 + rank * 5 + part * 11
    if op == "PRODUCT":  # at most one rank's number is 2 at any place of the block
        return np.where(mixed % 64 == 0, 2, 1)
    return mixed % 4


def numbers(part: Part, ranks: int, variant: int, op: str) -> Numbers:
    """Return the block that `part` stands for; a mean is a float, everything else whole."""
    if part.rank is not None:
        return written(part.rank, part.part, variant, op)
    blocks = [written(rank, part.part, variant, op) for rank in range(ranks)]
    total: Numbers = OPS[op].reduce(blocks)
    return total / ranks if op == "AVG" else total
