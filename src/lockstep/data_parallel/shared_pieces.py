"""Pieces of shared parameters: the elements on which each rank steps the optimizer.

    bucket     | w: block 0 | block 1 | block 2 | b |      cuts are at the start of a tensor,
    2 ranks    |       rank 0         |    rank 1   |      or whole blocks after it
    pieces     | w[0:131072]          | w[131072:] | b |

A block is the unit of the gradient norm, and a multiple of the width of all vector instructions,
so a kernel treats each element of a piece as it does in the whole tensor. The plan depends only on
sizes and dtypes, so every rank computes the same plan. A parameter stays in its bucket; parameters
that require a gradient later get further buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from lockstep.comm.bucket import Bucket, plan
from lockstep.kernel.norm import BLOCK

__all__ = ["PIECE", "SharedPiece", "SharedPieces", "find_cuts"]

PIECE = 4 * BLOCK
"""The maximum number of elements of a piece, so that parameter, gradient and state of one stay in
the cache."""


@dataclass(frozen=True)
class SharedPiece:
    """Elements [start, stop) of parameter `index`, in memory order, held by `rank`."""

    index: int
    start: int
    stop: int
    rank: int


def find_cuts(bucket: Bucket, ranks: int) -> list[int]:
    """Return the offsets at which a bucket is cut, as evenly as whole blocks allow.

    Rank j holds the elements [cuts[j], cuts[j + 1]). The first cut is 0, the last cut is the
    length of the bucket.
    """
    offsets = [
        member.offset + start
        for member in bucket.members
        for start in range(0, max(member.numel, 1), BLOCK)
    ]
    offsets.append(bucket.length)
    inner = [
        min(offsets, key=lambda offset: abs(offset - bucket.length * rank / ranks))
        for rank in range(1, ranks)
    ]
    return [0, *inner, bucket.length]


class SharedPieces:
    """The buckets of some parameters, their cuts and their pieces.

    Args:
        numels: The number of elements of each parameter.
        dtypes: The dtype of each parameter.
        ranks: The number of ranks that share the parameters.
        capacity: The capacity of a bucket in bytes.
        overflow: The size in bytes up to which a bucket also takes a tensor that does not fit.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        ranks: int,
        capacity: int,
        overflow: int = 0,
    ) -> None:
        self._numels = numels
        self._dtypes = dtypes
        self._ranks = ranks
        self._capacity = capacity
        self._overflow = overflow
        self.covered: list[int] = []
        self.buckets: list[Bucket] = []
        self.pieces: list[SharedPiece] = []

    def cover(self, numbers: Sequence[int]) -> list[Bucket]:
        """Plan and return buckets for those of these parameters that have no bucket yet."""
        new = sorted({*numbers} - {*self.covered})
        buckets = plan(
            [self._numels[number] for number in new],
            [self._dtypes[number] for number in new],
            self._capacity,
            new,
            self._overflow,
        )
        self.covered += new
        self.buckets += buckets
        self.pieces += [piece for bucket in buckets for piece in self._pieces(bucket)]
        return buckets

    def find_cuts(self, bucket: Bucket) -> list[int]:
        """Return the offsets at which a bucket is cut."""
        return find_cuts(bucket, self._ranks)

    def _pieces(self, bucket: Bucket) -> list[SharedPiece]:
        edges = self.find_cuts(bucket)
        pieces = []
        for member in bucket.members:
            for rank, (begin, end) in enumerate(pairwise(edges)):
                lowest = max(begin - member.offset, 0)
                highest = min(end - member.offset, member.numel)
                for start in range(lowest, highest, PIECE):
                    pieces.append(
                        SharedPiece(member.index, start, min(start + PIECE, highest), rank)
                    )
            if not member.numel:
                pieces.append(SharedPiece(member.index, 0, 0, 0))  # an empty tensor has state, too
        return pieces
