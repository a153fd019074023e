"""The reproducible all-reduce across hosts: each host combines its whole subtrees first.

The buckets are those of `lockstep.comm.native_all_reduce`: the nodes of the ranks of a host are in
shared memory. `lockstep.comm.hosts.reduction` adds them, with one message per slice and remaining
node between hosts, and the sums replace the first node of every rank:

    host A: ranks 0, 1 hold 01 and 23       0123 ──────> 0123 + 4567 on the owners of slices on B
    host B: ranks 2, 3 hold 45 and 67       4567 ──────> 0123 + 4567 on the owners of slices on A

Which members are absent from which nodes is exchanged meanwhile, in one small message per host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions

from lockstep.comm.bucket import Bucket
from lockstep.comm.hosts.compression import make_codec
from lockstep.comm.hosts.map import HostMap
from lockstep.comm.hosts.reduction import Group, HostReducer, chunk_length
from lockstep.comm.hosts.reduction_pipeline import Agreement
from lockstep.comm.hosts.reduction_plan import plan_reduction
from lockstep.comm.native_all_reduce import ABSENT, NEW, NativeAllReduce
from lockstep.comm.reduction_arithmetic import Reduction
from lockstep.comm.shared_memory import HANDLE_LENGTH, get_memory_handle
from lockstep.kernel.tree import Node

__all__ = ["HostAllReduce"]

FLAGS_START = HANDLE_LENGTH * 8  # bytes of the handle, in a rank's row

Submit = Callable[[torch.Tensor, Callable[[Agreement], None]], Any]
"""Runs a function after the earlier calls of the group, in its thread; returns a Work.

The tensor is the memory of the result."""


class HostAllReduce(NativeAllReduce):
    """The implementation for the backend "lockstep" across hosts.

    Args:
        group: The group.
        reducer: The reducer of the group.
        submit: A function that runs another one in the order of the group's calls.
        bucket, holders, leaves, divisor, cuts, scatter: As for `NativeAllReduce`.
        compression: How data between hosts is compressed; see `lockstep.comm.hosts.compression`.
    """

    def __init__(
        self,
        group: Group,
        reducer: HostReducer,
        submit: Submit,
        bucket: Bucket,
        holders: Sequence[Sequence[Node]],
        leaves: int,
        divisor: int,
        cuts: Sequence[int] | None = None,
        scatter: bool = False,
        compression: str | None = None,
    ) -> None:
        super().__init__(group.local, bucket, holders, leaves, group.rank, divisor, cuts, scatter)
        self._group, self._reducer, self._submit = group, reducer, submit
        self._reduction = Reduction.of_gradients(bucket.dtype, divisor)
        self._is_scattered = scatter
        self._codec = make_codec(compression, bucket.dtype)
        self._sum_plan = plan_reduction(group.map, holders, leaves, scatter=scatter)
        self._counts = [len(nodes) for nodes in holders]
        # The rows of this rank for the other ranks of the host: its handle, then its flags.
        flags = max(self._counts) * len(bucket.members)
        self._row = torch.zeros(FLAGS_START + flags, dtype=torch.uint8)
        handle = torch.tensor(get_memory_handle(self._packed), dtype=torch.int64)
        self._row[:FLAGS_START].copy_(handle.view(torch.uint8))
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}  # mapped memory, by handle

    def _packs_all(self) -> bool:
        return True  # another rank of the host may handle this rank's slice

    def _start(self, own: torch.Tensor | None, in_steps: bool) -> Any:
        self._row[FLAGS_START : FLAGS_START + self._flags.numel()].copy_(self._flags)
        return self._submit(self.sums, self._add)

    def advance(self) -> None:
        """Do nothing: the sum continues in the group's thread while the network is busy."""

    def _add(self, agreement: Agreement) -> None:
        """Add the bucket; runs in the thread of the group."""
        agreement = agreement.joined()
        ranks = self._group.map.hosts[self._reducer.host]
        gathered = [torch.empty_like(self._row) for _ in ranks]
        # Also the barrier after which all ranks of the host have packed their nodes.
        self._group.local.allgather([gathered], [self._row], AllgatherOptions()).wait()
        handles = [tuple(each[:FLAGS_START].view(torch.int64).tolist()) for each in gathered]
        flags = torch.stack([each[FLAGS_START:] for each in gathered])
        sizes = [hi - lo for lo, hi in pairwise(self._bounds)]
        chunk = chunk_length(sizes, self._bucket.dtype.itemsize)
        presence = Presence(
            self._reducer, self._group.map, self._counts, self._bucket, flags, agreement
        )
        rows = self._map_rows(dict(zip(ranks, handles, strict=True)))
        values = PackedValues(
            self._reducer, rows, self._bounds, self._is_scattered, chunk, presence
        )
        self._reducer.run(
            self._sum_plan, self._reduction, values, sizes, chunk, self._codec, agreement
        )
        for member, is_new in enumerate(presence.find_new()):
            self._present[member] = is_new

    def _map_rows(self, handles: dict[int, tuple[int, ...]]) -> dict[int, torch.Tensor]:
        """Return the rows of every rank of the host, a matrix with a row per node."""
        found = {self._reducer.rank: self._values}
        kept = {}
        for rank, handle in handles.items():
            if rank == self._reducer.rank:
                continue
            count, length = max(self._counts[rank], 1), self._bucket.length
            if handle not in self._rows:
                size = count * length * self._bucket.dtype.itemsize
                self._rows[handle] = self._group.local.map_peer(list(handle), size)
            kept[handle] = self._rows[handle]
            found[rank] = kept[handle].view(self._bucket.dtype).view(count, length)
        self._rows = kept
        return found


class PackedValues:
    """The nodes of a bucket, which every rank of the host has packed in shared memory.

    Args:
        reducer: The reducer.
        rows: By rank of this host, its nodes as a matrix with a row per node; the sums replace the
            first row. All ranks have packed them.
        cuts: The bounds of the slices.
        is_scattered: Whether the owner of a slice keeps its result for itself.
        chunk: The number of elements of a chunk of a slice.
        presence: Which members are present.
    """

    def __init__(
        self,
        reducer: HostReducer,
        rows: dict[int, torch.Tensor],
        cuts: Sequence[int],
        is_scattered: bool,
        chunk: int,
        presence: Presence,
    ) -> None:
        self._reducer, self._rows, self._cuts, self._chunk = reducer, rows, cuts, chunk
        self._presence = presence
        others = [rank for rank in rows if rank != reducer.rank]
        self._others = [] if is_scattered else [rows[rank][0] for rank in others]

    def load(self, chunk: int) -> None:
        """Do nothing: the values are in shared memory."""

    def publish(self) -> None:
        """Do nothing: only the handler of a slice reads and writes it on this host."""

    def read(self, rank: int, number: int, slice_: int, chunk: int) -> torch.Tensor:
        """Return the values of a node of a rank of this host."""
        lo, hi = self._span(slice_, chunk)
        return self._rows[rank][number, lo:hi]

    def result(self, slice_: int, chunk: int) -> torch.Tensor:
        """Return the memory for the result of a slice that this rank handles."""
        return self.read(self._reducer.rank, 0, slice_, chunk)

    def spread(self, slice_: int, chunk: int) -> None:
        """Write the result of a slice that this rank handles to the other ranks of the host."""
        lo, hi = self._span(slice_, chunk)
        for row in self._others:
            row[lo:hi].copy_(self.result(slice_, chunk))

    def store(self, chunk: int) -> None:
        """Do nothing: the handlers write the results to every rank's memory."""

    def end(self) -> None:
        """Wait until all handlers of the host have written their results."""
        self._reducer.barrier()

    def parts(
        self, inputs: Sequence[Sequence[tuple[int, int]]], slice_: int, chunk: int
    ) -> list[tuple[slice, list[bool]]]:
        """Return the whole chunk if all members are present, otherwise each member."""
        lo, hi = self._span(slice_, chunk)
        parts = self._presence.parts(inputs, lo, hi)
        return [(slice(begin - lo, end - lo), present) for begin, end, present in parts]

    def _span(self, slice_: int, chunk: int) -> tuple[int, int]:
        """Return the elements of the bucket in a chunk of a slice."""
        lo = self._cuts[slice_] + chunk * self._chunk
        return lo, max(lo, min(lo + self._chunk, self._cuts[slice_ + 1]))


class Presence:
    """Which members of a bucket have a value in which nodes; ranks exchange it between hosts.

    Args:
        reducer: The reducer, whose messages are used.
        hosts: The ranks of each host.
        counts: The number of nodes of each rank.
        bucket: The bucket.
        flags: The flags of the ranks of this host: a row of bytes per rank, with a flag per node
            and member, padded to the same length on all hosts.
        agreement: What the ranks of the call have in common.
    """

    def __init__(
        self,
        reducer: HostReducer,
        hosts: HostMap,
        counts: Sequence[int],
        bucket: Bucket,
        flags: torch.Tensor,
        agreement: Agreement,
    ) -> None:
        tag = agreement.tags[2]
        self._members, self._counts = bucket.members, counts
        self._flags: dict[tuple[int, int], bytes] = {}
        self._read(hosts.hosts[reducer.host], flags)
        self._receives: list[tuple[Any, Sequence[int], torch.Tensor]] = []
        self._sends = []
        for host, ranks in enumerate(hosts.hosts):
            if host == reducer.host:
                continue
            buffer = torch.empty(len(ranks), flags.shape[1], dtype=torch.uint8)
            work = reducer.receive(buffer.view(-1), hosts.partner(reducer.rank, host), tag)
            self._receives.append((work, ranks, buffer))
            for rank in ranks:
                if hosts.partner(rank, reducer.host) == reducer.rank:
                    self._sends.append(reducer.send(flags.view(-1), rank, tag))

    def parts(
        self, inputs: Sequence[Sequence[tuple[int, int]]], lo: int, hi: int
    ) -> list[tuple[int, int, list[bool]]]:
        """Return (begin, end, presence of each input) of the parts of elements [lo, hi).

        An input that combines several nodes is present if one of them is. If all inputs have all
        members, the elements are one part.
        """
        if not all(key in self._flags for keys in inputs for key in keys):
            self._wait()
        rows = [[self._flags[key] for key in keys] for keys in inputs]
        if all(ABSENT not in flags for row in rows for flags in row):
            return [(lo, hi, [])]
        return [
            (begin, end, [any(flags[number] != ABSENT for flags in row) for row in rows])
            for number, member in enumerate(self._members)
            if (begin := max(lo, member.offset)) < (end := min(hi, member.offset + member.numel))
        ]

    def find_new(self) -> list[bool]:
        """Return for each member whether it is new in any node of any rank."""
        self._wait()
        rows = self._flags.values()
        return [any(row[member] == NEW for row in rows) for member in range(len(self._members))]

    def _wait(self) -> None:
        for work, ranks, buffer in self._receives:
            work.wait()
            self._read(ranks, buffer)
        for work in self._sends:
            work.wait()
        self._receives, self._sends = [], []

    def _read(self, ranks: Sequence[int], flags: torch.Tensor) -> None:
        width = len(self._members)
        for rank, row in zip(ranks, flags, strict=True):
            content = bytes(row.numpy())
            for number in range(self._counts[rank]):
                self._flags[rank, number] = content[number * width : (number + 1) * width]
