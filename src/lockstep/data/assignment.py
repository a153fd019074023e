"""The assignment of micro-batches to replicas, which changes no bit.

Replicas get contiguous ranges whose sizes differ by at most one. Micro-batches follow hosts:
replicas on one host compute neighboring micro-batches, so that the host has whole subtrees of the
tree and sends fewer sums to other hosts:

    replicas 0, 2 on host A, 1, 3 on host B      replica 0 | replica 2 | replica 1 | replica 3
    M = 8                                        m = 0, 1  | m = 2, 3  | m = 4, 5  | m = 6, 7

The replicas of a sharded model take turns instead, so that each exchange of gradients adds one node
of the tree. Each host has all shards then, and a range of the micro-batches; without replication
over hosts, all replicas count as on one:

    replicas 0, 1, M = 8         turn 0: m = 0 | 1    turn 1: m = 2 | 3    ...
    0, 1 on A, 2, 3 on B         turn 0: m = 0 | 1 and 4 | 5

The functions are pure and do not depend on processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lockstep.kernel.errors import LayoutError
from lockstep.kernel.splitting import count_microbatches, split_evenly
from lockstep.kernel.tree import Node, nodes_of

__all__ = ["Hosts", "ReplicaShare", "assign_microbatches", "assign_nodes", "on_one_host"]

Hosts = tuple[tuple[int, ...], ...]
"""The replicas of each host."""


def on_one_host(replicas: int) -> Hosts:
    """Return the hosts of replicas that are all on one host."""
    return (tuple(range(replicas)),)


@lru_cache(maxsize=64)
def assign_microbatches(leaves: int, hosts: Hosts) -> tuple[range, ...]:
    """Assign `leaves` micro-batches to replicas; return the micro-batches of each replica.

    Each host gets a contiguous range, and each of its replicas a part of it. The numbers of
    micro-batches of any two replicas differ by at most one. Of all such ranges, those are chosen
    that have the fewest nodes of the tree: one per host, where the numbers allow it.
    """
    replicas = sum(map(len, hosts))
    small, larger = divmod(leaves, replicas)
    assigned = [range(0)] * replicas
    start = 0
    for ranks, extra in zip(hosts, _spread(leaves, small, larger, hosts), strict=True):
        stop = start + len(ranks) * small + extra
        for replica, span in zip(ranks, split_evenly(stop - start, len(ranks)), strict=True):
            assigned[replica] = range(start + span.start, start + span.stop)
        start = stop
    return tuple(assigned)


@lru_cache(maxsize=64)
def assign_turns(leaves: int, hosts: Hosts) -> tuple[range, ...]:
    """Return the micro-batches of each replica, if the replicas of a host take turns."""
    assigned = [range(0)] * sum(map(len, hosts))
    for ranks, span in zip(hosts, split_evenly(leaves, len(hosts)), strict=True):
        for position, replica in enumerate(ranks):
            assigned[replica] = range(span.start + position, span.stop, len(ranks))
    return tuple(assigned)


@lru_cache(maxsize=16)
def assign_nodes(leaves: int, hosts: Hosts) -> Sequence[Sequence[Node]]:
    """Return, for each replica, the nodes of the tree that cover its micro-batches.

    The result is kept, because every step needs it and it is as long as the number of replicas.
    """
    return tuple(tuple(nodes_of(span, leaves)) for span in assign_microbatches(leaves, hosts))


def _spread(leaves: int, small: int, larger: int, hosts: Hosts) -> list[int]:
    """Return how many replicas of each host compute `small + 1` micro-batches, `larger` in total.

    A dynamic program over the hosts. It considers cuts near the even ones only, so that its time is
    linear in the number of hosts.
    """
    replicas = sum(map(len, hosts))
    widest = max(map(len, hosts))
    if len(hosts) == 1 or not larger:
        return [larger] + [0] * (len(hosts) - 1)
    # For each number of larger replicas so far: nodes, distance from the even cuts, the choices.
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    before = 0
    for ranks in hosts:
        count = before + len(ranks)
        even = larger * count // replicas
        lowest = max(0, larger - (replicas - count), even - widest)
        highest = min(larger, count, even + widest)
        options: dict[int, tuple[int, int, list[int]]] = {}
        for total in range(lowest, highest + 1):
            for extra in range(len(ranks) + 1):
                if total - extra not in best:
                    continue
                nodes, distance, chosen = best[total - extra]
                span = range(before * small + total - extra, count * small + total)
                cost = nodes + len(nodes_of(span, leaves))
                option = (cost, distance + abs(total - even), [*chosen, extra])
                options[total] = min(options.get(total, option), option)
        best = options
        before = count
    return best[larger][2]


@dataclass(frozen=True)
class ReplicaShare:
    """The micro-batches of one replica.

    Attributes:
        microbatches: The number of micro-batches of a batch.
        hosts: The replicas of each host; if they take turns, the ranks of each copy of the model.
        replica: The replica.
        is_sharded: Whether the replicas take turns, as those of a sharded model.
    """

    microbatches: int
    hosts: Hosts
    replica: int
    is_sharded: bool = False

    def __post_init__(self) -> None:
        """Raise LayoutError if the replica has no micro-batches, or does not exist."""
        if not 0 <= self.replica < self.replicas:
            raise LayoutError(f"replica {self.replica} of {self.replicas} does not exist")
        if self.replicas > self.microbatches:
            raise LayoutError(
                f"{self.replicas} replicas cannot share {self.microbatches} micro-batches; "
                f"use at least {self.replicas} micro-batches, or fewer replicas"
            )
        ranks = self.replicas
        if self.is_sharded and (ranks & (ranks - 1) or self.microbatches % ranks):
            raise LayoutError(
                f"{ranks} ranks cannot train a sharded model with {self.microbatches} "
                "micro-batches: use a number of ranks that is a power of two and divides the "
                "number of micro-batches"
            )
        if self.is_sharded and len(sizes := {*map(len, self.hosts)}) > 1:
            raise LayoutError(
                f"the hosts have {min(sizes)} to {max(sizes)} ranks, and each of them must divide "
                "a sharded model in the same way: start as many ranks on each host, or train with "
                'storage="sharded"'
            )

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return sum(map(len, self.hosts))

    @property
    def shards(self) -> int:
        """The number of ranks that divide a sharded model."""
        return len(self.hosts[0])

    def nodes(self, leaves: int) -> Sequence[Sequence[Node]]:
        """Return, for each replica, the nodes of the tree that cover its micro-batches."""
        if not self.is_sharded or self.shards == 1:
            return assign_nodes(leaves, self.hosts)
        return [[(leaf, leaf + 1) for leaf in span] for span in self.spans(leaves)]

    def spans(self, leaves: int) -> Sequence[range]:
        """Return, for each replica, its micro-batches."""
        takes_turns = self.is_sharded and self.shards > 1
        return (assign_turns if takes_turns else assign_microbatches)(leaves, self.hosts)

    def require_samples(self, samples: int) -> None:
        """Raise LayoutError unless every rank has a micro-batch of a batch of `samples`."""
        if samples < self.replicas:
            raise LayoutError(
                f"the last batch of an epoch has fewer samples ({samples}) than there are ranks "
                f"({self.replicas}): pass drop_last=True, or change the batch_size"
            )

    def require_turns(self, leaves: int, computed: int) -> None:
        """Raise LayoutError if replicas take turns, and some would compute nothing in one.

        Args:
            leaves: The number of micro-batches of a batch.
            computed: The number of those whose weight is not 0.
        """
        if self.is_sharded and (leaves % self.replicas or computed < leaves):
            empty = leaves - computed
            weights = f", {empty} of them with a weight of 0" if empty else ""
            remedy = "leave out samples without weight" if empty else "pass drop_last=True"
            raise LayoutError(
                f"a batch has {leaves} micro-batches{weights}, which the {self.replicas} ranks of "
                f"a sharded model cannot share evenly: {remedy}, or use fewer ranks"
            )

    @lru_cache(maxsize=256)  # noqa: B019 - shares are few
    def pieces(self, samples: int) -> tuple[tuple[int, range], ...]:
        """Return (index, positions) of this replica's micro-batches in a batch of `samples`."""
        if samples == 0:
            return ()
        leaves = count_microbatches(samples, self.microbatches)
        cuts = split_evenly(samples, leaves)
        return tuple((index, cuts[index]) for index in self.spans(leaves)[self.replica])
