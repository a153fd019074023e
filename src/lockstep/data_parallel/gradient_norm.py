"""Clipping: gradients scaled down to a norm, computed block by block.

    gradient, in memory order   | block 0: 65,536 elements | block 1 | ... | the rest |
    of each block               norm in its own dtype, squared in float64
    the norm                    the root of the sum of all squares, added exactly

Blocks begin at the gradient's first element, so whoever holds some of them can
add theirs: a replica its part, a stage its parameters. `partial` makes of any
number of squares a few numbers with the same exact sum, which travel in one
small message. The outcome depends neither on the order nor on the place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from lockstep.comm.memory_format import in_memory_order

__all__ = ["BLOCK", "norm", "partial", "scale", "squares"]

BLOCK = 1 << 16
"""Elements of a block; part of the promise."""


@torch.no_grad()
def squares(gradients: Sequence[torch.Tensor], part: int = 0, parts: int = 1) -> list[float]:
    """Return the squared 2-norm of each block of the gradients, in order.

    With `parts` only those of the part number `part`, when all blocks are shared
    out evenly and in order.
    """
    counts = [-(-gradient.numel() // BLOCK) for gradient in gradients]
    whole = sum(counts)
    lowest, highest = whole * part // parts, whole * (part + 1) // parts
    found: list[float] = []
    begin = 0
    for gradient, count in zip(gradients, counts, strict=True):
        first, last = max(lowest - begin, 0), min(highest - begin, count)
        if first < last:
            found += _squares(in_memory_order(gradient)[first * BLOCK : last * BLOCK])
        begin += count
    return found


def _squares(vector: torch.Tensor) -> list[float]:
    """Return the squares of a vector's blocks; full ones are the rows of one call."""
    rows, rest = divmod(vector.numel(), BLOCK)
    norms: list[float] = []
    if rows:
        matrix = vector[: rows * BLOCK].view(rows, BLOCK)
        norms += torch.linalg.vector_norm(matrix, dim=1).tolist()
    if rest:
        norms.append(float(torch.linalg.vector_norm(vector[rows * BLOCK :])))
    return [each * each for each in norms]


def partial(squares: Iterable[float]) -> list[float]:
    """Return a few numbers whose exact sum is that of `squares` (one where it is not finite)."""
    left = list(squares)
    found: list[float] = []
    while (value := _sum(left)) != 0:
        found.append(value)
        if not math.isfinite(value):
            return [value]
        left.append(-value)
    return found


def norm(squares: Iterable[float]) -> float:
    """Return the norm of which all ranks' squares, or their partial sums, are given."""
    return math.sqrt(_sum(squares))


@torch.no_grad()
def scale(gradients: Iterable[torch.Tensor], norm: float, limit: float | None) -> None:
    """Scale gradients of this norm so that it is at most `limit`.

    Without a limit, or where the norm is not finite, nothing is scaled.
    """
    if limit is not None and limit < norm < math.inf:
        for gradient in gradients:
            gradient.mul_(limit / norm)


def _sum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:  # finite numbers with a sum beyond float64
        return math.inf
