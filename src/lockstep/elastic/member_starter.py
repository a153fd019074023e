"""Starts the processes of an elastic run, each on the host that has too few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from lockstep.elastic.host_plan import (
    RankCoordinates,
    choose_host,
    find_coordinates,
    share_ranks,
)
from lockstep.launcher.environment import ELASTIC, JOIN, MEMBER, RankEnvironment
from lockstep.launcher.rank_processes import RankProcesses

__all__ = ["MemberStarter", "StartMember"]

StartMember = Callable[[int, int, int, dict[str, str]], None]
"""Starts a process: its number as a member, its host, its local rank, and its variables."""


class MemberStarter:
    """Starts members, with numbers that are never used again.

    Args:
        processes: The processes of the members, whose numbers are their ranks.
        start: Starts a member.
        environment: The variables of the members.
        nnodes: The number of hosts, some of which may be lost.
        common: More variables of all members.

    Attributes:
        common: The variables, which may change during the run.
    """

    def __init__(
        self,
        processes: RankProcesses,
        start: StartMember,
        environment: RankEnvironment,
        nnodes: int,
        common: Mapping[str, str],
    ) -> None:
        self.common = common
        self._processes = processes
        self._start = start
        self._environment = environment
        self._nnodes = nnodes
        self._next = 0

    @property
    def has_hosts(self) -> bool:
        """Whether the run is on several hosts."""
        return self._nnodes > 1

    @property
    def store(self) -> str:
        """The address of the private store of the members; "" on several hosts."""
        return self._environment.store

    def renew_store(self) -> None:
        """Replace the store after all members have exited, if it is private or lost."""
        stores = self._processes.stores
        if self.store:
            store = stores.create()
            stores.close_private(self.store)
            self._environment = replace(self._environment, store=store)
        elif stores.is_lost:
            port = stores.serve(self._environment.master_addr, 0)
            self._environment = replace(self._environment, master_port=port)

    def count_reachable(self, wanted: int) -> int:
        """Return how many of `wanted` ranks the run can have on the hosts that take part now."""
        if not self.has_hosts:
            return wanted
        shares = share_ranks(wanted, self._nnodes)
        return sum(shares[host] for host in self._processes.present)

    def list_next(self, count: int) -> list[int]:
        """Return the numbers of the next members that are started."""
        return [*range(self._next, self._next + count)]

    def start_together(self, count: int, number: int, variables: Mapping[str, str]) -> None:
        """Start the members of a round, all of which are new.

        Args:
            count: The number of members.
            number: The number of the round.
            variables: Their variables.
        """
        present = self._processes.present
        shares = zip(present, share_ranks(count, len(present)), strict=True)
        for coordinates in find_coordinates([host for host, share in shares for _ in range(share)]):
            member = self._start_member(coordinates, self._environment, number, variables)
            self._processes.outcomes[member].rank_in_world = coordinates.rank

    def start_newcomer(self, rank: int, wanted: int, number: int, others: Iterable[int]) -> int:
        """Start a member that joins others, and return its number.

        Args:
            rank: The rank that it expects.
            wanted: The number of ranks that the run should have.
            number: The number of the round.
            others: The members and newcomers that there are.
        """
        members = Counter(map(self._processes.host_of, others))
        shares = share_ranks(wanted, self._nnodes)
        host = choose_host(shares, self._processes.present, members) or 0
        hosts = [index for index in range(self._nnodes) for _ in range(members[index])]
        coordinates = replace(find_coordinates([*hosts, host])[-1], rank=rank, world_size=rank + 1)
        environment = replace(self._environment, store="")
        member = self._start_member(coordinates, environment, number, {JOIN: "1"})
        self._processes.outcomes[member].is_outside = True
        return member

    def _start_member(
        self,
        coordinates: RankCoordinates,
        environment: RankEnvironment,
        number: int,
        variables: Mapping[str, str],
    ) -> int:
        member = self._next
        self._next = self._next + 1
        own = {ELASTIC: "1", MEMBER: str(member), "TORCHELASTIC_RESTART_COUNT": str(number)}
        size = coordinates.local_world_size
        host = coordinates.host
        on_host = replace(environment, nprocs=size, node_rank=host)
        place = coordinates.rank, coordinates.world_size
        of_rank = on_host.variables(coordinates.local_rank, place)
        variables = {**of_rank, **own, **self.common, **variables}
        self._start(member, host, coordinates.local_rank, variables)
        return member
