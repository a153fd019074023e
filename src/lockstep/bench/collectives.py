"""The collectives that are measured: who holds what before and after, and what counts as fast.

A buffer is cut into *parts* of `count` elements. Of two ranks in an all_to_all:

    rank 0 before   (0,0) (0,1)        after   (0,0) (1,0)
    rank 1 before   (1,0) (1,1)        after   (0,1) (1,1)

where (r, p) is what rank r wrote into its part p, and [p] below the reduction of
(0,p) ... (n-1,p) over all ranks. Everything here is plain values: no torch, no numpy.

Bandwidths are those of nccl-tests: the *algorithm bandwidth* is bytes over time,
the *bus bandwidth* scales it by what the busiest link of an ideal ring carries,
so that it can be compared between numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["COLLECTIVES", "Collective", "Held", "Part"]

ROOT = 0


@dataclass(frozen=True)
class Part:
    """What one part of a buffer holds: what `rank` wrote, or the reduction where it is None."""

    rank: int | None
    part: int = 0


Held = tuple[Part, ...]
Holding = Callable[[int, int], Held]  # (rank, ranks) -> what its buffer holds


@dataclass(frozen=True)
class Collective:
    """One collective: its buffers before and after, and its bus-bandwidth factor.

    `is_shared` says that the input is the output (all_reduce); `alias` which part
    of the larger buffer the smaller one is when it is done in place, None where
    that cannot be asked for. `parts` is whether the buffers grow with the ranks.
    """

    name: str
    sentence: str
    before: Holding
    after: Holding
    factor: Callable[[int], float]
    is_shared: bool = False
    can_alias: bool = False
    reduces: bool = False
    is_cut: bool = False

    def elements(self, size: int, itemsize: int, ranks: int) -> int:
        """Return the elements of one part for a message of about `size` bytes, at least one."""
        if self.name == "barrier":
            return 0
        parts = ranks if self.is_cut else 1
        return max(1, -(-size // (itemsize * parts)))

    def bytes(self, count: int, itemsize: int, ranks: int) -> int:
        """Return the size of the message: of the larger of input and output, as nccl-tests."""
        return count * itemsize * (ranks if self.is_cut else 1)


def own(rank: int, ranks: int) -> Held:
    """Hold one part, written by the rank itself."""
    return (Part(rank),)


def own_parts(rank: int, ranks: int) -> Held:
    """Hold a part for every rank, all written by the rank itself."""
    return tuple(Part(rank, part) for part in range(ranks))


def everyones(rank: int, ranks: int) -> Held:
    """Hold what every rank wrote."""
    return tuple(Part(other) for other in range(ranks))


def at_root(held: Holding) -> Holding:
    """Hold it at the root alone; the others hold nothing that counts."""
    return lambda rank, ranks: held(rank, ranks) if rank == ROOT else ()


def partner(rank: int, ranks: int) -> int | None:
    """Return whom `rank` exchanges messages with: 0 and 1, 2 and 3, ...; None for an odd last."""
    other = rank ^ 1
    return other if other < ranks else None


def partners(rank: int, ranks: int) -> Held:
    """Hold what the partner wrote."""
    other = partner(rank, ranks)
    return () if other is None else (Part(other),)


def whole(ranks: int) -> float:
    """Count every byte once."""
    return 1.0


def others(ranks: int) -> float:
    """Count the bytes that go to other ranks."""
    return (ranks - 1) / ranks


_ALL = (
    Collective(
        "all_reduce", "the sum of all ranks' tensors, on every rank",
        own, lambda rank, ranks: (Part(None),),
        lambda ranks: 2 * (ranks - 1) / ranks, is_shared=True, reduces=True,
    ),
    Collective(
        "reduce", "the sum of all ranks' tensors, on the first rank",
        own, at_root(lambda rank, ranks: (Part(None),)), whole, is_shared=True, reduces=True,
    ),
    Collective(
        "reduce_scatter", "the sum of all ranks' tensors, a slice to each",
        own_parts, lambda rank, ranks: (Part(None, rank),), others,
        can_alias=True, reduces=True, is_cut=True,
    ),
    Collective(
        "broadcast", "the first rank's tensor, to every rank",
        own, lambda rank, ranks: (Part(ROOT),), whole, is_shared=True,
    ),
    Collective(
        "all_gather", "every rank's tensor, to every rank",
        own, everyones, others, can_alias=True, is_cut=True,
    ),
    Collective(
        "gather", "every rank's tensor, to the first rank",
        own, at_root(everyones), others, is_cut=True,
    ),
    Collective(
        "scatter", "slices of the first rank's tensor, one to each rank",
        at_root(own_parts), lambda rank, ranks: (Part(ROOT, rank),), others, is_cut=True,
    ),
    Collective(
        "all_to_all", "a slice from every rank to every rank",
        own_parts, lambda rank, ranks: tuple(Part(r, rank) for r in range(ranks)), others,
        is_cut=True,
    ),
    Collective(
        "send_recv", "half a round trip between ranks 0 and 1, 2 and 3, ...",
        lambda rank, ranks: own(rank, ranks) if partners(rank, ranks) else (), partners, whole,
    ),
    Collective(
        "barrier", "until every rank is there",
        lambda rank, ranks: (), lambda rank, ranks: (), whole,
    ),
)  # fmt: skip

COLLECTIVES = {collective.name: collective for collective in _ALL}
