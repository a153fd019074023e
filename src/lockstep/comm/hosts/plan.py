"""The plans of collective calls across hosts: which rank sends what to which other host.

    broadcast     the ranks of the root's host get the data in shared memory. For every other host,
                  the data is cut into one slice per rank of that host; each slice crosses once:

                      root's host: 0 1         other host: 2 3
                      rank 0  ── slice 0 ──>   rank 2 ┐ each gives its slice to the
                      rank 1  ── slice 1 ──>   rank 3 ┘ other ranks in shared memory

    all_gather    each rank sends its data to one rank of every other host, which shares it there
    all others    each pair of ranks on different hosts exchanges its own data

So no byte is sent twice to one host. Everything is a pure function of the placement of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.comm.hosts.map import HostMap
from lockstep.comm.hosts.reduction_plan import slice_bounds

__all__ = ["Slice", "all_gather_rounds", "broadcast_slices", "chunks_of", "cut"]


@dataclass(frozen=True)
class Slice:
    """Bytes [`begin`, `end`) that rank `source` sends to rank `target` of another host."""

    source: int
    target: int
    begin: int
    end: int


def cut(size: int, parts: int) -> list[tuple[int, int]]:
    """Return the bounds of `parts` slices of `size` bytes, in whole cache lines."""
    return list(pairwise(slice_bounds(size, parts, 1)))


def chunks_of(size: int, most: int) -> list[tuple[int, int]]:
    """Return the bounds of chunks of at most `most` bytes."""
    return [(begin, min(begin + most, size)) for begin in range(0, size, most)]


def broadcast_slices(hosts: HostMap, root: int, size: int) -> list[Slice]:
    """Return what the ranks of the root's host send to the other hosts, of `size` bytes."""
    home = hosts.host_of(root)
    senders = hosts.hosts[home]
    slices = []
    for number, ranks in enumerate(hosts.hosts):
        if number == home:
            continue
        for position, (begin, end) in enumerate(cut(size, len(ranks))):
            source = senders[position % len(senders)]
            slices.append(Slice(source, ranks[position], begin, end))
    return slices


def all_gather_rounds(hosts: HostMap, host: int) -> list[list[int | None]]:
    """Return which blocks the ranks of a host share in each round of an all-gather.

    Returns:
        For each round, the rank whose block each rank of the host has received; None for none.
    """
    width = len(hosts.hosts[host])
    rounds: list[list[int | None]] = []
    for number, ranks in enumerate(hosts.hosts):
        if number == host:
            continue
        for first in range(0, len(ranks), width):
            given: Sequence[int | None] = ranks[first : first + width]
            rounds.append([*given, *[None] * (width - len(given))])
    return rounds
