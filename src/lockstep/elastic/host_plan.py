"""Where the ranks of an elastic run are: pure functions of plain values.

    wanted = 5, two hosts             share_ranks(5, 2) = [3, 2]
    ranks of a round                  0 1 2 | 3 4        contiguous on each host

A host that is lost leaves its share empty until it joins again: the others keep theirs. The first
rank of a round is a member of the last round, because it continues the record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "RankCoordinates",
    "choose_host",
    "find_coordinates",
    "order_by_host",
    "share_ranks",
]


@dataclass(frozen=True)
class RankCoordinates:
    """The coordinates of a rank in the world and on its host.

    Attributes:
        rank: Its rank.
        world_size: The number of ranks.
        host: The index of its host.
        local_rank: Its rank among those of its host.
        local_world_size: The number of ranks of its host.
    """

    rank: int
    world_size: int
    host: int
    local_rank: int
    local_world_size: int


def share_ranks(wanted: int, hosts: int) -> list[int]:
    """Return how many of `wanted` ranks each host gets; the first ones get one more."""
    return [wanted // hosts + (host < wanted % hosts) for host in range(hosts)]


def find_coordinates(hosts: Sequence[int]) -> list[RankCoordinates]:
    """Return the coordinates of each rank.

    Args:
        hosts: The index of the host of each rank.
    """
    sizes = Counter(hosts)
    seen = Counter[int]()
    coordinates = []
    for rank, host in enumerate(hosts):
        coordinates.append(RankCoordinates(rank, len(hosts), host, seen[host], sizes[host]))
        seen[host] += 1
    return coordinates


def order_by_host(
    staying: Sequence[int], joined: Iterable[int], host_of: Callable[[int], int]
) -> tuple[int, ...]:
    """Return the members of a round by rank: those of one host have contiguous ranks.

    Args:
        staying: The members of the last round that stay, by rank. The first one stays first.
        joined: The new members.
        host_of: Returns the index of a member's host.
    """
    members = [*staying, *joined]
    hosts = list(dict.fromkeys(map(host_of, members)))
    return tuple(sorted(members, key=lambda member: hosts.index(host_of(member))))


def choose_host(
    shares: Sequence[int], present: Collection[int], members: Mapping[int, int]
) -> int | None:
    """Return the host on which the next process is started; None if all have their share.

    Args:
        shares: The number of ranks that each host is to have.
        present: The hosts that can start processes.
        members: The number of members that a host has.
    """
    missing = {host: shares[host] - members.get(host, 0) for host in present}
    best = max(sorted(missing), key=lambda host: missing[host], default=None)
    return best if best is not None and missing[best] > 0 else None
