"""The hosts of a group's ranks: which ranks are together on a host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["HostMap"]


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

    def partner(self, rank: int, host: int) -> int:
        """Return the rank of a host that exchanges data with `rank`; on its own host, itself.

        The ranks of a host are spread evenly over those of the other host, so that every rank
        carries its own share over its own connection.
        """
        ranks = self.hosts[host]
        return ranks[self.local_rank(rank) % len(ranks)]

    def partners(self, rank: int) -> list[int]:
        """Return the ranks of other hosts that `rank` exchanges data with, or they with it."""
        home = self.host_of(rank)
        return [
            other
            for host, ranks in enumerate(self.hosts)
            for other in ranks
            if host != home
            and (self.partner(rank, host) == other or self.partner(other, home) == rank)
        ]

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (host, position)
            for host, ranks in enumerate(self.hosts)
            for position, rank in enumerate(ranks)
        }
