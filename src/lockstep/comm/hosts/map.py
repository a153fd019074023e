"""The hosts of a group's ranks: which ranks are together on a host, and what they add alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lockstep.kernel.tree import Node, TreeAccumulator

__all__ = ["HostMap", "find_host_nodes"]


@dataclass(frozen=True)
class HostMap:
    """The ranks of a group by host.

    Attributes:
        hosts: The ranks of each host, in ascending order; hosts in the order of their lowest rank.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, identities: Sequence[Hashable]) -> HostMap:
        """Return the map of ranks 0, 1, ... whose hosts have these identities."""
        hosts: dict[Hashable, list[int]] = {}
        for rank, identity in enumerate(identities):
            hosts.setdefault(identity, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in hosts.values()))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._coordinates)

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host, from 0."""
        return self._coordinates[rank][0]

    def local_rank(self, rank: int) -> int:
        """Return the position of a rank among the ranks of its host, from 0."""
        return self._coordinates[rank][1]

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (host, position)
            for host, ranks in enumerate(self.hosts)
            for position, rank in enumerate(ranks)
        }


def find_host_nodes(
    hosts: Sequence[Sequence[int]], nodes_by_rank: Sequence[Sequence[Node]], leaves: int
) -> list[list[Node]]:
    """Return the largest nodes of the tree that the ranks of each host add among themselves.

    Contiguous ranks leave one node or a few. With alternating ranks (0, 2 and 1, 3) it is one per
    leaf, because no addition of the tree is local.

    Args:
        hosts: The ranks of each host.
        nodes_by_rank: The nodes that each rank holds.
        leaves: The number of leaves of the tree.
    """
    nodes = []
    for ranks in hosts:
        added: TreeAccumulator[None] = TreeAccumulator(leaves, lambda left, right: None)
        for rank in ranks:
            for node in nodes_by_rank[rank]:
                added.put(node, None)
        nodes.append(sorted(added.nodes))
    return nodes
