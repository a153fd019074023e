"""Rule 6, the norm of the whole gradient and clipping by it, computed block by block.

    gradient, in memory order   | block 0: 65,536 elements | block 1 | ... | the rest |
    per block                   norm in its own dtype, squared in float64
    total norm                  square root of the exact sum of all squares

Blocks are counted from the first element of each gradient, so any rank can contribute the squares
of the blocks that it holds: a replica of its part, a pipeline stage of its parameters.
`compute_partial_sums` reduces any number of squares to a few numbers with the same exact
sum, which fit in one small message. The norm depends neither on the order of the squares
nor on the rank that computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from lockstep.kernel.exact_sum import round_sum

__all__ = [
    "BLOCK",
    "SHARED_ELEMENTS",
    "clip_gradients_",
    "compute_block_norms",
    "compute_norm",
    "compute_squares",
    "in_memory_order",
    "is_dense",
]

BLOCK = 1 << 16
"""The number of elements per block. The bits of the norm depend on it."""

SHARED_ELEMENTS = 1 << 18
"""The least number of elements of which each replica computes the squares of a part.

Of fewer, each computes all of them, in less time than a message takes.
"""


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a block of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as a vector in memory order, without a copy.

    For a tensor with gaps or overlaps, the vector is a copy in logical order.
    """
    if tensor.is_contiguous() or not is_dense(tensor):
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


@torch.no_grad()
def compute_squares(
    gradients: Sequence[torch.Tensor],
    part: int = 0,
    parts: int = 1,
    measure: Callable[[Sequence[torch.Tensor]], list[float] | None] | None = None,
) -> list[float]:
    """Return the squared 2-norm of each block of the gradients, in order.

    Args:
        gradients: The gradients; blocks are in memory order.
        part: The number of the part of the blocks to compute.
        parts: The number of parts into which all blocks are divided evenly and in order.
        measure: A function that returns the norms of gradients of one block each, with the same
            bits as torch; None, or a result of None, for those of torch.
    """
    counts = [-(-gradient.numel() // BLOCK) for gradient in gradients]
    whole = sum(counts)
    dtypes = {gradient.dtype for gradient in gradients}
    if parts == 1 and counts.count(1) == whole > 0 and len(dtypes) == 1:
        norms_of_all = None if measure is None else measure(gradients)
        if norms_of_all is None:
            norms_of_all = _read(_compute_short_norms([*map(in_memory_order, gradients)]))
        return [norm * norm for norm in norms_of_all]
    lowest = whole * part // parts
    highest = whole * (part + 1) // parts
    norms: list[torch.Tensor] = []  # read at once: each read waits for an accelerator
    short: list[torch.Tensor] = []  # gradients of one block, whose norms one call computes
    begin = 0
    for gradient, count in zip(gradients, counts, strict=True):
        first = max(lowest - begin, 0)
        last = min(highest - begin, count)
        if first < last:
            vector = in_memory_order(gradient)
            if count == 1 and (not short or short[0].dtype == vector.dtype):
                short.append(vector)
            else:
                norms += _compute_short_norms(short)
                short = []
                norms += compute_block_norms(vector[first * BLOCK : last * BLOCK])
        begin += count
    return [norm * norm for norm in _read(norms + _compute_short_norms(short))]


def _compute_short_norms(vectors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each vector, as one tensor; all have one dtype."""
    return [torch.stack(torch._foreach_norm(vectors))] if vectors else []


def compute_block_norms(vector: torch.Tensor) -> list[torch.Tensor]:
    """Return the norms of a vector's blocks; one call computes all full blocks."""
    rows, rest = divmod(vector.numel(), BLOCK)
    norms: list[torch.Tensor] = []
    if rows:
        norms.append(torch.linalg.vector_norm(vector[: rows * BLOCK].view(rows, BLOCK), dim=1))
    if rest:
        norms.append(torch.linalg.vector_norm(vector[rows * BLOCK :]).view(1))
    return norms


def _read(norms: list[torch.Tensor]) -> list[float]:
    """Return the elements of vectors, one after another, without rounding."""
    if not norms:
        return []
    if len({vector.dtype for vector in norms}) > 1:
        norms = [vector.double() for vector in norms]
    numbers: list[float] = (torch.cat(norms) if len(norms) > 1 else norms[0]).tolist()
    return numbers


def compute_norm(squares: Iterable[float]) -> float:
    """Return the total norm, from the squares or the partial sums of all ranks."""
    return math.sqrt(round_sum(squares))


@torch.no_grad()
def clip_gradients_(gradients: Iterable[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients in place, from the total norm `norm` to at most `max_norm`.

    Nothing is scaled if the norm is not finite.
    """
    if max_norm < norm < math.inf:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
