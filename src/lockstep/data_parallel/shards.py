"""Shards: which rank keeps which elements of the parameters, and steps the optimizer on them.

    bucket     | w: block 0 | block 1 | block 2 | b |      cuts lie at a tensor's beginning
    2 ranks    |       rank 0         |    rank 1   |      or whole blocks after it
    pieces     | w[0:131072]          | w[131072:] | b |

A block is what the norm is computed of, and a multiple of every vector's width: a
kernel that goes over a piece treats each element as it does in the whole tensor.
All of this is arithmetic on sizes, so every rank finds the same plan. A parameter
keeps its place for good; those that come to be trained later get further buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from lockstep.comm.bucket import Bucket, plan
from lockstep.data_parallel.gradient_norm import BLOCK

__all__ = ["PIECE", "Piece", "Shards", "cuts"]

PIECE = 4 * BLOCK
"""Elements that are stepped at once: parameter, gradient and state stay in the cache."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of parameter `index`, in memory order, kept by `rank`."""

    index: int
    start: int
    stop: int
    rank: int


def cuts(bucket: Bucket, ranks: int) -> list[int]:
    """Return where a bucket is cut for `ranks` ranks, as evenly as whole blocks allow.

    Rank j has the elements from cut j to cut j + 1; the first cut is 0, the last the length.
    """
    places = [
        member.offset + start
        for member in bucket.members
        for start in range(0, max(member.numel, 1), BLOCK)
    ]
    places.append(bucket.length)
    inner = [
        min(places, key=lambda place: abs(place - bucket.length * rank / ranks))
        for rank in range(1, ranks)
    ]
    return [0, *inner, bucket.length]


class Shards:
    """The buckets of some tensors, their cuts and their pieces.

    Parameters:
        numels, dtypes: of all parameters.
        ranks: among which they are shared out.
        capacity: bytes of a bucket.
    """

    def __init__(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], ranks: int, capacity: int
    ) -> None:
        self._numels, self._dtypes = numels, dtypes
        self._ranks, self._capacity = ranks, capacity
        self.covered: list[int] = []
        self.buckets: list[Bucket] = []
        self.pieces: list[Piece] = []

    def cover(self, numbers: Sequence[int]) -> list[Bucket]:
        """Plan the parameters of these numbers that have no place yet; return their buckets."""
        new = sorted({*numbers} - {*self.covered})
        buckets = plan(
            [self._numels[number] for number in new],
            [self._dtypes[number] for number in new],
            self._capacity,
            indices=new,
        )
        self.covered += new
        self.buckets += buckets
        self.pieces += [piece for bucket in buckets for piece in self._pieces(bucket)]
        return buckets

    def cuts(self, bucket: Bucket) -> list[int]:
        """Return the cuts of one of the buckets."""
        return cuts(bucket, self._ranks)

    def _pieces(self, bucket: Bucket) -> list[Piece]:
        edges = self.cuts(bucket)
        found = []
        for member in bucket.members:
            for rank, (begin, end) in enumerate(pairwise(edges)):
                lowest = max(begin - member.offset, 0)
                highest = min(end - member.offset, member.numel)
                for start in range(lowest, highest, PIECE):
                    found.append(Piece(member.index, start, min(start + PIECE, highest), rank))
            if not member.numel:
                found.append(Piece(member.index, 0, 0, 0))  # its optimizer's state is a state too
        return found
