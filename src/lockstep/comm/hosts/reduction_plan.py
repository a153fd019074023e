"""The plan of a reduction across hosts: which rank combines and sends what, for any placement.

The elements are cut into slices. One rank, the owner, reduces a slice for all ranks. On every other
host, one rank handles the slice for its host:

    hosts    A: ranks 0, 1     B: ranks 2, 3          slices 0 1 2 3, one per rank

    slice 0  rank 2 combines what B has, sends it to rank 0; rank 0 adds, sends the sum to rank 2
    slice 1  rank 3 ......................................... rank 1 ................... rank 3
    slice 2  rank 0 combines what A has, sends it to rank 2; rank 2 adds, sends the sum to rank 0
    slice 3  rank 1 ......................................... rank 3 ................... rank 1

A handler combines only nodes of the tree whose leaves are all on its host, so the order of the
additions is that of one host. It sends one *term* per remaining node: with contiguous ranks one,
with alternating ranks (0, 2 and 1, 3) one per leaf, because no addition of the tree is local.
Reductions whose result does not depend on the order need one term per host in any placement.

Two hosts that send at most one term each, no larger than the result, exchange the terms of all
slices, and both add them. That takes the same bytes, but no result waits for a term:

    slice 0  rank 2 combines what B has, rank 0 what A has; they exchange it, and both add
    slice 1  rank 3 ............................. rank 1 ................................

Everything is a pure function of the hosts and the nodes that each rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.comm.bucket import ALIGNMENT, round_up
from lockstep.comm.hosts.map import HostMap
from lockstep.kernel.tree import Node, TreeAccumulator

__all__ = ["ReductionPlan", "Term", "plan_reduction", "slice_bounds"]


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
        owners: The rank that reduces each slice, or that reduces it on its host.
        terms: The terms of each host, the same for every slice.
        is_wide: For each host, whether its terms have the wider dtype in which the values are
            combined.
        leaves: The number of leaves of the tree over all terms.
        is_exchange: Whether every handler reduces its slice, with the terms of all hosts.
        returns: Whether an owner sends the result of its slice to the other hosts.
    """

    map: HostMap
    owners: tuple[int, ...]
    terms: tuple[tuple[Term, ...], ...]
    is_wide: tuple[bool, ...]
    leaves: int
    is_exchange: bool
    returns: bool

    def reduces(self, rank: int, slice_: int) -> bool:
        """Return whether a rank that handles a slice also reduces it."""
        return self.is_exchange or self.owners[slice_] == rank

    def receivers(self, rank: int, slice_: int) -> list[int]:
        """Return the ranks that get the terms of a slice from the rank that handles it."""
        if not self.is_exchange:
            return [self.owners[slice_]] if self.owners[slice_] != rank else []
        home = self.map.host_of(rank)
        return [self.handler(slice_, each) for each in range(len(self.map.hosts)) if each != home]

    def handler(self, slice_: int, host: int) -> int:
        """Return the rank that handles a slice on a host; on its own host, that is the owner."""
        return self.map.partner(self.owners[slice_], host)

    def handled(self, rank: int) -> list[int]:
        """Return the slices that a rank handles on its host, its own included."""
        host = self.map.host_of(rank)
        return [each for each in range(len(self.owners)) if self.handler(each, host) == rank]

    def traffic(
        self, bounds: Sequence[int], itemsize: int, wide: int
    ) -> dict[tuple[int, int], int]:
        """Return the bytes that each host sends to each other host.

        Args:
            bounds: The bounds of the slices, in elements.
            itemsize: The bytes of an element.
            wide: The bytes of an element of the wider dtype.
        """
        hosts = range(len(self.map.hosts))
        pairs = [(a, b) for a in hosts for b in hosts if a != b]
        sent = dict.fromkeys(pairs, 0)
        for slice_, owner in enumerate(self.owners):
            home, size = self.map.host_of(owner), bounds[slice_ + 1] - bounds[slice_]
            for host in hosts:
                width = wide if self.is_wide[host] else itemsize
                for rank in self.receivers(self.handler(slice_, host), slice_):
                    sent[host, self.map.host_of(rank)] += len(self.terms[host]) * size * width
                if host != home:
                    sent[home, host] += size * itemsize * self.returns
        return sent


def slice_bounds(length: int, slices: int, itemsize: int) -> list[int]:
    """Return the bounds of the slices of `length` elements, in whole cache lines."""
    width = round_up(round_up(length, slices) // slices, max(ALIGNMENT // itemsize, 1))
    return [min(each * width, length) for each in range(slices + 1)]


def plan_reduction(
    hosts: HostMap,
    holders: Sequence[Sequence[Node]],
    leaves: int,
    root: int | None = None,
    *,
    scatter: bool = False,
    is_order_free: bool = False,
    wide_factor: int = 1,
    is_scaled: bool = False,
) -> ReductionPlan:
    """Plan a reduction of values whose ranks are on several hosts.

    Args:
        hosts: The ranks of each host.
        holders: The nodes of the tree that each rank holds. Together they cover all leaves.
        leaves: The number of leaves of the tree.
        root: The rank that gets the result; None for all ranks. The ranks of its host reduce.
        scatter: Whether only the owner of a slice gets its result.
        is_order_free: Whether the result does not depend on the order, as with integers; every
            rank then holds a node.
        wide_factor: The bytes of an element of a combined term, relative to those of a value.
            A host combines its terms only if that makes them smaller.
        is_scaled: Whether each value is multiplied by a factor first, in the wider dtype.
    """
    owners = tuple(range(len(holders)))
    if root is not None:
        owners = hosts.hosts[hosts.host_of(root)]
    terms: list[tuple[Term, ...]] = []
    wide: list[bool] = []
    for number, ranks in enumerate(hosts.hosts):
        held = sorted((node, rank, i) for rank in ranks for i, node in enumerate(holders[rank]))
        if is_order_free:
            single = tuple((each, each + 1) for each in range(len(held)))
            inputs = tuple((rank, i) for _, rank, i in held)
            terms.append((Term((number, number + 1), inputs, single, len(held)),))
            wide.append(False)
            continue
        combined = _combine(held, leaves)
        is_smaller = is_scaled or len(combined) * wide_factor < len(held) or wide_factor == 1
        alone = tuple(Term(node, ((rank, i),), ((0, 1),), 1) for node, rank, i in held)
        terms.append(combined if is_smaller else alone)
        wide.append(is_smaller and wide_factor > 1)
    is_single = all(len(each) <= 1 for each in terms) and not any(wide)
    returns = root is None and not scatter
    is_exchange = returns and is_single and len(hosts.hosts) == 2
    return ReductionPlan(
        map=hosts,
        owners=owners,
        terms=tuple(terms),
        is_wide=tuple(wide),
        leaves=len(hosts.hosts) if is_order_free else leaves,
        is_exchange=is_exchange,
        returns=returns and not is_exchange,
    )


def _combine(held: Sequence[tuple[Node, int, int]], leaves: int) -> tuple[Term, ...]:
    """Return the terms of a host: the largest nodes that cover only leaves on it."""
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
