"""The collectives of the benchmark: buffer contents before and after, and bandwidth factors.

A buffer consists of *parts* of `count` elements. For an all_to_all of two ranks:

    rank 0 before   (0,0) (0,1)        after   (0,0) (1,0)
    rank 1 before   (1,0) (1,1)        after   (0,1) (1,1)

where (r,p) is the value that rank r wrote into its part p. This module uses neither torch
nor numpy.

Bandwidths are those of nccl-tests: the *algorithm bandwidth* is bytes divided by time; the
*bus bandwidth* scales it by the load of the busiest link of an ideal ring, so that it can
be compared between numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["COLLECTIVES", "ROOT", "BufferPart", "Collective", "partner"]

ROOT = 0


@dataclass(frozen=True)
class BufferPart:
    """The contents of one part of a buffer: written by `rank`, or, if None, the reduction."""

    rank: int | None
    part: int = 0


Contents = tuple[BufferPart, ...]
ContentsOf = Callable[[int, int], Contents]  # (rank, ranks) -> contents of its buffer


@dataclass(frozen=True)
class Collective:
    """A collective.

    Attributes:
        name: Its name in `torch.distributed`.
        description: A description of its result, for help texts.
        before: The contents of the input, by rank and number of ranks.
        after: The contents of the output.
        bus_factor: Bus bandwidth over algorithm bandwidth, by number of ranks.
        is_in_place: Whether input and output are always one buffer (all_reduce).
        is_reduction: Whether it takes a reduction operation.
        has_part_per_rank: Whether the message consists of one part per rank.
    """

    name: str
    description: str
    before: ContentsOf
    after: ContentsOf
    bus_factor: Callable[[int], float]
    is_in_place: bool = False
    is_reduction: bool = False
    has_part_per_rank: bool = False

    def elements(self, size: int, itemsize: int, ranks: int) -> int:
        """Return the elements per part, at least one, of a message of about `size` bytes."""
        if self.name == "barrier":
            return 0
        parts = ranks if self.has_part_per_rank else 1
        return max(1, -(-size // (itemsize * parts)))

    def bytes(self, count: int, itemsize: int, ranks: int) -> int:
        """Return the bytes of the message: the larger of input and output, as in nccl-tests."""
        return count * itemsize * (ranks if self.has_part_per_rank else 1)


def own(rank: int, ranks: int) -> Contents:
    """One part, written by the rank itself."""
    return (BufferPart(rank),)


def own_parts(rank: int, ranks: int) -> Contents:
    """One part per rank, all written by the rank itself."""
    return tuple(BufferPart(rank, part) for part in range(ranks))


def all_parts(rank: int, ranks: int) -> Contents:
    """The parts of all ranks."""
    return tuple(BufferPart(other) for other in range(ranks))


def at_root(held: ContentsOf) -> ContentsOf:
    """The contents on the root; nothing on the other ranks."""
    return lambda rank, ranks: held(rank, ranks) if rank == ROOT else ()


def partner(rank: int, ranks: int) -> int | None:
    """Return the partner of `rank` (0 and 1, 2 and 3, ...), or None for an odd last rank."""
    other = rank ^ 1
    return other if other < ranks else None


def partner_part(rank: int, ranks: int) -> Contents:
    """The part of the partner."""
    other = partner(rank, ranks)
    return () if other is None else (BufferPart(other),)


def one(ranks: int) -> float:
    """Return 1: every byte counts once."""
    return 1.0


def other_ranks(ranks: int) -> float:
    """Return the share of the bytes that are for other ranks."""
    return (ranks - 1) / ranks


_ALL = (
    Collective(
        "all_reduce", "the sum of all ranks' tensors, on every rank",
        own, lambda rank, ranks: (BufferPart(None),),
        lambda ranks: 2 * (ranks - 1) / ranks, is_in_place=True, is_reduction=True,
    ),
    Collective(
        "reduce", "the sum of all ranks' tensors, on the first rank",
        own, at_root(lambda rank, ranks: (BufferPart(None),)), one,
        is_in_place=True, is_reduction=True,
    ),
    Collective(
        "reduce_scatter", "the sum of all ranks' tensors, one slice per rank",
        own_parts, lambda rank, ranks: (BufferPart(None, rank),), other_ranks,
        is_reduction=True, has_part_per_rank=True,
    ),
    Collective(
        "broadcast", "the first rank's tensor, to every rank",
        own, lambda rank, ranks: (BufferPart(ROOT),), one, is_in_place=True,
    ),
    Collective(
        "all_gather", "every rank's tensor, to every rank",
        own, all_parts, other_ranks, has_part_per_rank=True,
    ),
    Collective(
        "gather", "every rank's tensor, to the first rank",
        own, at_root(all_parts), other_ranks, has_part_per_rank=True,
    ),
    Collective(
        "scatter", "slices of the first rank's tensor, one per rank",
        at_root(own_parts), lambda rank, ranks: (BufferPart(ROOT, rank),), other_ranks,
        has_part_per_rank=True,
    ),
    Collective(
        "all_to_all", "a slice from every rank to every rank",
        own_parts, lambda rank, ranks: tuple(BufferPart(r, rank) for r in range(ranks)),
        other_ranks, has_part_per_rank=True,
    ),
    Collective(
        "send_recv", "half a round trip between ranks 0 and 1, 2 and 3, ...",
        lambda rank, ranks: own(rank, ranks) if partner_part(rank, ranks) else (),
        partner_part, one,
    ),
    Collective(
        "barrier", "wait until every rank has arrived",
        lambda rank, ranks: (), lambda rank, ranks: (), one,
    ),
)  # fmt: skip

COLLECTIVES = {collective.name: collective for collective in _ALL}
