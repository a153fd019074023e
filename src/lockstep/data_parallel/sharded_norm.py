"""The norm of gradients whose shards need not consist of whole blocks of the norm.

    gradient, by rows        | rank 0           | rank 1           |
    blocks of the norm       | 0      | 1      | 2      | 3 |
    computed by              | rank 0 | a rank | rank 1      |

A rank computes the norms of the blocks that lie in its shard. The pieces of any other block are
sent to one rank, which differs from block to block. Per parameter these are at most two blocks for
each boundary of shards, so little is sent for large parameters. A gradient of a single block
is always sent. The norm has the bits of gradients that are whole on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.distributed as dist

from lockstep.comm.activity import Waiting
from lockstep.kernel.exact_sum import add_over_ranks
from lockstep.kernel.norm import (
    BLOCK,
    clip_gradients_,
    compute_block_norms,
    compute_norm,
    compute_squares,
)
from lockstep.model.group_exchange import GroupMessages
from lockstep.sharded_tensors import local_part

__all__ = ["clip_grad_norm_", "compute_sharded_squares", "find_spans"]


@dataclass(frozen=True)
class _Block:
    """A block of the norm that is divided between ranks.

    Attributes:
        gradient: The number of the gradient.
        owner: The rank that computes its norm.
        pieces: The elements [start, stop) of the gradient that each rank holds.
        is_single: Whether the gradient has only this block.
    """

    gradient: int
    owner: int
    pieces: tuple[tuple[int, int], ...]
    is_single: bool


def find_spans(shape: torch.Size, ranks: int) -> list[tuple[int, int]]:
    """Return the elements [start, stop) of a tensor of this shape that each rank holds."""
    rows = shape[0]
    width = torch.Size(shape[1:]).numel()
    chunk = -(-rows // ranks)
    cuts = [min(rank * chunk, rows) * width for rank in range(ranks + 1)]
    return list(pairwise(cuts))


@lru_cache(maxsize=8)
def _divide(shapes: tuple[torch.Size, ...], ranks: int) -> tuple[_Block, ...]:
    """Return the blocks that no rank holds alone."""
    blocks: list[_Block] = []
    for number, shape in enumerate(shapes):
        spans = find_spans(shape, ranks)
        length = shape.numel()
        for start in range(0, length, BLOCK):
            stop = min(start + BLOCK, length)
            pieces = tuple((max(a, start), max(min(b, stop), max(a, start))) for a, b in spans)
            if sum(low < high for low, high in pieces) > 1:
                is_single = length <= BLOCK
                blocks.append(_Block(number, len(blocks) % ranks, pieces, is_single))
    return tuple(blocks)


@torch.no_grad()
def compute_sharded_squares(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[float]:
    """Return the squares of some blocks of the norm, so that all ranks together have each once.

    A collective call.

    Args:
        gradients: The sharded gradients, of the same parameters on every rank.
        group: The ranks.
    """
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    blocks = _divide(tuple(gradient.shape for gradient in gradients), ranks)
    norms = list[torch.Tensor]()
    short = list[torch.Tensor]()
    for gradient in gradients:
        start, stop = find_spans(gradient.shape, ranks)[rank]
        vector = local_part(gradient).reshape(-1)
        for low, high in _find_whole(start, stop, gradient.numel()):
            part = vector[low - start : high - start]
            if gradient.numel() <= BLOCK:
                short.append(part)
            else:
                norms += compute_block_norms(part)
    for vector, block in _exchange(gradients, blocks, group):
        if block.is_single:
            short.append(vector)
        else:
            norms += compute_block_norms(vector)
    numbers = torch.cat([norm.double() for norm in norms]).tolist() if norms else []
    return [number * number for number in numbers] + compute_squares(short)


@torch.no_grad()
def clip_grad_norm_(
    gradients: Sequence[torch.Tensor], max_norm: float, group: dist.ProcessGroup | None, about: str
) -> float:
    """Scale gradients to a 2-norm of at most `max_norm`; return their norm before.

    Args:
        gradients: The gradients, the same on every rank, or sharded.
        max_norm: The largest norm.
        group: The ranks over which they are sharded; None if they are not.
        about: A few words on the activity, for messages.
    """
    if group is None:
        parts = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        norm = compute_norm(compute_squares(parts))
    else:
        parts = [local_part(gradient) for gradient in gradients]
        squares = compute_sharded_squares(gradients, group)
        norm = compute_norm(add_over_ranks(squares, GroupMessages(group), about))
    clip_gradients_(parts, norm, max_norm)
    return norm


def _find_whole(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the elements of the whole blocks in [start, stop), if there are any."""
    low = -(-start // BLOCK) * BLOCK
    high = stop if stop == length else stop // BLOCK * BLOCK
    if low < high:
        yield low, high


def _exchange(
    gradients: Sequence[torch.Tensor], blocks: Sequence[_Block], group: dist.ProcessGroup
) -> Iterator[tuple[torch.Tensor, _Block]]:
    """Yield the blocks that this rank computes, after a message to each rank per dtype."""
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    for dtype in dict.fromkeys(gradients[block.gradient].dtype for block in blocks):
        sent = [block for block in blocks if gradients[block.gradient].dtype == dtype]
        mine = [block for block in sent if block.owner == rank]
        pieces = list[torch.Tensor]()
        sizes = [0] * ranks
        for block in sorted(sent, key=lambda block: block.owner):
            low, high = block.pieces[rank]
            gradient = gradients[block.gradient]
            start = find_spans(gradient.shape, ranks)[rank][0]
            pieces.append(local_part(gradient).reshape(-1)[low - start : high - start])
            sizes[block.owner] += high - low
        spans = [[block.pieces[source] for block in mine] for source in range(ranks)]
        counts = [[high - low for low, high in one] for one in spans]
        flat = torch.cat(pieces)
        received = flat.new_empty(sum(map(sum, counts)))
        with Waiting("exchange of parts of the norm of gradients"):
            dist.all_to_all_single(received, flat, [*map(sum, counts)], sizes, group=group)
        parts = zip(
            *[
                part.split(lengths)
                for part, lengths in zip(received.split([*map(sum, counts)]), counts, strict=True)
            ],
            strict=True,
        )
        for block, of_block in zip(mine, parts, strict=True):
            yield torch.cat(of_block), block
