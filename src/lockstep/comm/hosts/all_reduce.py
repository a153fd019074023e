"""The reproducible all-reduce across hosts: each host adds its own nodes of the tree first.

    host A: ranks 0, 1 hold 01 and 23     slices of 0123 on ranks 0 and 1, in shared memory
    host B: ranks 2, 3 hold 45 and 67     slices of 4567 on ranks 2 and 3

    ranks 0 and 2    exchange halves of the first slice, add them, exchange the sums
    ranks 1 and 3    the same with the second slice
    host A           ranks 0 and 1 copy each other's slice of the sum, in shared memory

There are as many slices as ranks on the smallest host. The order of the additions is that of one
host, and no sum is sent to a host twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial

import torch
from torch._C._distributed_c10d import BroadcastOptions

from lockstep.comm.bucket import ALIGNMENT, Bucket, Member, cut_bucket, parts, round_up
from lockstep.comm.hosts.group import ANSWER_TIMEOUT, HostGroup
from lockstep.comm.hosts.map import find_host_nodes
from lockstep.comm.hosts.process_group import HostWork
from lockstep.comm.native_all_reduce import NativeAllReduce
from lockstep.comm.portable_all_reduce import PortableAllReduce
from lockstep.comm.reproducible_all_reduce import Held, ReproducibleAllReduce, Values
from lockstep.comm.slice_plan import SlicePlan

__all__ = ["HostAllReduce"]

FIRST_TAG = 1 << 30
"""The lowest tag of sums; users' messages have lower ones."""

TAGS = (1 << 29) - 2
"""The number of pairs of tags, below those of the group itself."""

PATIENCE = 1.0
"""Seconds by which a rank waits longer for another host than ranks of a host for each other. An
error in shared memory names the rank that is late and its line of code."""


class HostAllReduce(ReproducibleAllReduce):
    """The implementation for the backend "lockstep" across hosts.

    Args:
        group: The group.
        bucket, nodes_by_rank, leaves: As for `make_all_reduce`.
    """

    def __init__(
        self,
        group: HostGroup,
        bucket: Bucket,
        nodes_by_rank: Sequence[Sequence[tuple[int, int]]],
        leaves: int,
    ) -> None:
        self._group = group
        self.bucket = bucket
        host = group.map.host_of(group.rank)
        self._position = group.map.local_rank(group.rank)
        ranks = group.map.hosts[host]
        own = nodes_by_rank[group.rank]
        host_nodes = find_host_nodes(group.map.hosts, nodes_by_rank, leaves)
        slices = min(map(len, group.map.hosts))
        line = ALIGNMENT // bucket.dtype.itemsize
        length = round_up(-(-bucket.length // slices), line)
        self._cuts = [min(number * length, bucket.length) for number in range(slices + 1)]
        bounds = [*self._cuts, *[bucket.length] * (len(ranks) - slices)]
        self._local = {
            node: NativeAllReduce(
                group.local, bucket, [_nodes_in(node, nodes_by_rank[rank]) for rank in ranks],
                node[1] - node[0], self._position, bounds, scatter=True,
            )
            for node in host_nodes[host]
        }  # fmt: skip
        if own:
            self.sums = self._local[self._find(own[0])].sums
        else:
            self.sums = torch.empty(bucket.length, dtype=bucket.dtype)
        self._present = torch.zeros(max(len(bucket.members), 1), dtype=torch.uint8)
        self._plan = zlib.crc32(repr((bucket, nodes_by_rank, leaves)).encode())
        self._transport: HostTransport | None = None
        self._between: PortableAllReduce | None = None
        if self._position < slices:
            peers = [of_host[self._position] for of_host in group.map.hosts]
            self._slice = slice(self._cuts[self._position], self._cuts[self._position + 1])
            part = cut_bucket(bucket, self._slice)
            self._transport = HostTransport(group, peers, host)
            plan = SlicePlan(part, host_nodes, leaves, host)
            self._between = PortableAllReduce(plan, self._transport, torch.device("cpu"))
        self._is_sent = False

    def _find(self, node: tuple[int, int]) -> tuple[int, int]:
        """Return the node of this host that contains a node of this rank."""
        return next(own for own in self._local if own[0] <= node[0] and node[1] <= own[1])

    def destination(self, node: tuple[int, int], member: Member) -> torch.Tensor:
        """Return the destination of a member's value in one of this rank's nodes."""
        lo, hi = self._find(node)
        return self._local[lo, hi].destination((node[0] - lo, node[1] - lo), member)

    def launch(self, held: Held, in_steps: bool = False) -> None:
        """Start the sums of this host; see `ReproducibleAllReduce.launch`."""
        self._call, number = self._group.begin_sum()
        checksum = zlib.crc32(number.to_bytes(8, "little"), self._plan)
        self._tag = FIRST_TAG + checksum % TAGS * 2  # that of no sum of other tensors
        self._is_sent = False
        for (lo, hi), local in self._local.items():
            inner = {(a - lo, b - lo): held[a, b] for a, b in held if lo <= a and b <= hi}
            local.launch(inner, in_steps)

    def advance(self) -> None:
        """Send the sums of this host if they are complete; see `ReproducibleAllReduce`."""
        for local in self._local.values():
            local.advance()
        if all(local.is_completed() for local in self._local.values()):
            self.combine()

    def combine(self) -> None:
        """Send this rank's slice of the sums of this host to other hosts."""
        if self._is_sent:
            return
        self._is_sent = True
        held = dict[tuple[int, int], Values]()
        for node, local in self._local.items():
            with self._group.explaining(self._call):
                sums = local.gather()
            if self._between is not None:
                vector = local.sums[self._slice]
                held[node] = {
                    m.index: None if value is None else vector[m.offset : m.offset + m.numel]
                    for m, (_, value) in zip(self._between.bucket.members, sums, strict=True)
                }
        if self._transport is not None and self._between is not None:
            self._transport.begin(self._call, self._tag)
            self._between.launch(held)

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish; see `ReproducibleAllReduce.gather`."""
        self.combine()
        if self._between is not None:
            self._between.combine()
            sums = self._between.gather()
            self.sums[self._slice].copy_(self._between.sums[: self._between.bucket.length])
            flags = [value is not None for _, value in sums]
            self._present[: len(flags)] = torch.tensor(flags, dtype=torch.uint8)
        with self._group.explaining(self._call):
            self._spread()
        return parts(self.bucket, self.sums, self._present[: len(self.bucket.members)].tolist())

    def _spread(self) -> None:
        """Copy the slices of the other ranks of this host."""
        local = self._group.local
        if local.size() == 1:
            return
        # The other ranks may still wait for other hosts, twice, and then state the cause.
        self._group.limit_local_calls(self._group.timeout + 2 * PATIENCE + ANSWER_TIMEOUT)
        slices = [self.sums[lo:hi] for lo, hi in zip(self._cuts, self._cuts[1:], strict=False)]
        for root, vector in [*enumerate(slices), (0, self._present)]:
            if vector.numel():
                options = BroadcastOptions()
                options.rootRank = root
                local.broadcast([vector], options).wait()


class HostTransport:
    """Messages of one rank of each host, whose tags belong to one sum.

    Args:
        group: The group.
        peers: The rank of each host, in the order of the hosts.
        host: The number of this host.
    """

    def __init__(self, group: HostGroup, peers: Sequence[int], host: int) -> None:
        self._group = group
        self._peers = peers
        self._host = host
        self._call = ""
        self._tag = 0

    def begin(self, call: str, tag: int) -> None:
        """Begin a sum.

        Args:
            call: The call, for messages.
            tag: The first of the two tags of its messages.
        """
        self._call = call
        self._tag = tag

    def exchange(
        self, rows: torch.Tensor, received: torch.Tensor, widths: Sequence[int]
    ) -> PendingMessages:
        """Start to send row j to host j; see `SliceTransport`."""
        return self._swap(list(rows), received.split(list(widths)), self._tag)

    def gather(self, mine: torch.Tensor, sums: torch.Tensor) -> PendingMessages:
        """Start to send the sum of this host's slice to all hosts; see `SliceTransport`."""
        hosts = len(self._peers)
        slices = sums.view(torch.uint8).view(hosts, -1)
        return self._swap([mine.view(torch.uint8)] * hosts, list(slices), self._tag + 1)

    def _swap(
        self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor], tag: int
    ) -> PendingMessages:
        """Send a vector of bytes to every host, and receive one from each."""
        group = self._group
        gloo = group.gloo
        works = []
        for host, peer in enumerate(self._peers):
            if host == self._host:
                into[host].copy_(out[host])
                continue
            for message, vector in ((gloo.recv, into[host]), (gloo.send, out[host])):
                if vector.numel():
                    begin = partial(message, [vector], peer, tag)
                    awaited = group.describe(peer)
                    work = HostWork(group, begin, self._call, awaited, peer, patience=PATIENCE)
                    works.append(work)
        return PendingMessages(works)


class PendingMessages:
    """Messages on their way."""

    def __init__(self, works: Sequence[HostWork]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait until all are sent or received."""
        for work in self._works:
            work.wait()


def _nodes_in(outer: tuple[int, int], nodes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the nodes below another one, in the tree of which that is the root."""
    lo, hi = outer
    return [(a - lo, b - lo) for a, b in nodes if lo <= a and b <= hi]
