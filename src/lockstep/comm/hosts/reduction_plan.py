"""The plan of a reduction across hosts: which rank combines and sends what, for any placement.

The elements are cut into one slice per rank, the owner, which reduces it for all ranks. On every
other host, one rank handles the slice for its host:

    hosts    A: ranks 0, 1     B: ranks 2, 3          slices 0 1 2 3, one per rank

    slice 0  rank 2 combines what B has, sends it to rank 0; rank 0 adds, sends the sum to rank 2
    slice 1  rank 3 ......................................... rank 1 ................... rank 3
    slice 2  rank 0 combines what A has, sends it to rank 2; rank 2 adds, sends the sum to rank 0
    slice 3  rank 1 ......................................... rank 3 ................... rank 1

A handler combines only nodes of the tree whose leaves are all on its host, so the order of the
additions is that of one host. It sends one *term* per remaining node: with contiguous ranks one,
with alternating ranks (0, 2 and 1, 3) one per leaf, because no addition of the tree is local.

Two hosts that send at most one term each exchange the terms of all slices, and both add them. That
takes the same bytes, but no result waits for a term:

    slice 0  rank 2 combines what B has, rank 0 what A has; they exchange it, and both add
    slice 1  rank 3 ............................. rank 1 ................................

Everything is a pure function of the hosts and the nodes that each rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.comm.bucket import round_up
from lockstep.comm.hosts.map import HostMap
from lockstep.kernel.tree import Node, TreeAccumulator

__all__ = ["ReductionPlan", "Term", "chunk_length", "plan_reduction"]

CHUNK_BYTES = 1 << 20
"""The bytes of a chunk, of all slices together, by measurement: see LOG.md."""

LEAST_MESSAGE_BYTES = 128 << 10
"""A chunk is not smaller than this per slice, unless the slice is."""


@dataclass(frozen=True)
class Term:
    """What a host sends of a slice: the combination of values of its ranks.

    Attributes:
        node: The node of the tree over all terms of all hosts.
        inputs: (rank, number of the rank's node) of the values, in the order of the tree.
        nodes: The node of each input in the tree of the inputs.
        leaves: The number of leaves of that tree.
    """

    node: Node
    inputs: tuple[tuple[int, int], ...]
    nodes: tuple[Node, ...]
    leaves: int


@dataclass(frozen=True)
class ReductionPlan:
    """The plan of a reduction.

    Attributes:
        map: The ranks of each host.
        slices: The number of slices, one per rank, which owns it.
        terms: The terms of each host, the same for every slice.
        leaves: The number of leaves of the tree over all terms.
        is_exchange: Whether every handler reduces its slice, with the terms of all hosts.
        returns: Whether an owner sends the result of its slice to the other hosts.
    """

    map: HostMap
    slices: int
    terms: tuple[tuple[Term, ...], ...]
    leaves: int
    is_exchange: bool
    returns: bool

    def reduces(self, rank: int, slice_: int) -> bool:
        """Return whether a rank that handles a slice also reduces it."""
        return self.is_exchange or slice_ == rank

    def receivers(self, rank: int, slice_: int) -> list[int]:
        """Return the ranks that get the terms of a slice from the rank that handles it."""
        if not self.is_exchange:
            return [slice_] if slice_ != rank else []
        home = self.map.host_of(rank)
        hosts = range(len(self.map.hosts))
        return [self.handler(slice_, host) for host in hosts if host != home]

    def handler(self, slice_: int, host: int) -> int:
        """Return the rank that handles a slice on a host; on its own host, that is the owner."""
        return self.map.partner(slice_, host)

    def handled(self, rank: int) -> list[int]:
        """Return the slices that a rank handles on its host, its own included."""
        host = self.map.host_of(rank)
        return [slice_ for slice_ in range(self.slices) if self.handler(slice_, host) == rank]


def plan_reduction(
    hosts: HostMap,
    nodes_by_rank: Sequence[Sequence[Node]],
    leaves: int,
    *,
    scatter: bool = False,
) -> ReductionPlan:
    """Plan a reduction of values whose ranks are on several hosts.

    Args:
        hosts: The ranks of each host.
        nodes_by_rank: The nodes of the tree that each rank holds. Together they cover all leaves.
        leaves: The number of leaves of the tree.
        scatter: Whether only the owner of a slice gets its result.
    """
    terms = tuple(_combine(ranks, nodes_by_rank, leaves) for ranks in hosts.hosts)
    is_exchange = not scatter and len(terms) == 2 and all(len(of_host) <= 1 for of_host in terms)
    return ReductionPlan(
        map=hosts,
        slices=len(nodes_by_rank),
        terms=terms,
        leaves=leaves,
        is_exchange=is_exchange,
        returns=not scatter and not is_exchange,
    )


def _combine(
    ranks: Sequence[int], nodes_by_rank: Sequence[Sequence[Node]], leaves: int
) -> tuple[Term, ...]:
    """Return the terms of a host: the largest nodes that cover only leaves on it."""
    held = sorted((node, rank, i) for rank in ranks for i, node in enumerate(nodes_by_rank[rank]))
    fold: TreeAccumulator[list[tuple[Node, int, int]]] = TreeAccumulator(
        leaves, lambda left, right: left + right
    )
    for entry in held:
        fold.put(entry[0], [entry])
    return tuple(
        Term(
            (lo, hi),
            tuple((rank, i) for _, rank, i in entries),
            tuple((a - lo, b - lo) for (a, b), _, _ in entries),
            hi - lo,
        )
        for (lo, hi), entries in sorted(fold.nodes.items())
    )


def chunk_length(sizes: Sequence[int], itemsize: int) -> int:
    """Return the number of elements of a chunk of one slice, in whole cache lines."""
    line = max(64 // itemsize, 1)
    most = CHUNK_BYTES // len(sizes) // itemsize // line * line
    largest = max(sizes, default=0)
    least = LEAST_MESSAGE_BYTES // itemsize
    quarter = round_up(round_up(largest, 4) // 4, line)
    return max(line, min(most, max(least, quarter)))
