"""The reproducible all-reduce across hosts: each host combines its whole subtrees first.

The buckets are those of `lockstep.comm.native_all_reduce`: the nodes of the ranks of a host are in
shared memory. `lockstep.comm.hosts.reduction_pipeline` adds them, with one message per slice and
remaining node between hosts, and the sums replace the first node of every rank:

    host A: ranks 0, 1 hold 01 and 23       0123 ──────> 0123 + 4567 on the owners of slices on B
    host B: ranks 2, 3 hold 45 and 67       4567 ──────> 0123 + 4567 on the owners of slices on A

Which members are absent from which nodes is exchanged meanwhile, in one small message per host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions

from lockstep.comm.bucket import Bucket
from lockstep.comm.hosts.bucket_fingerprint import (
    FINGERPRINT_BYTES,
    CollectiveFingerprint,
    FingerprintExchange,
)
from lockstep.comm.hosts.group import HostGroup
from lockstep.comm.hosts.packed_values import PackedValues, Presence
from lockstep.comm.hosts.reduction_pipeline import ReductionPipeline
from lockstep.comm.hosts.reduction_plan import chunk_length, plan_reduction
from lockstep.comm.native_all_reduce import NativeAllReduce
from lockstep.comm.shared_memory import HANDLE_LENGTH, get_memory_handle
from lockstep.kernel.tree import Node

__all__ = ["HostAllReduce"]

FLAGS_START = FINGERPRINT_BYTES + HANDLE_LENGTH * 8  # in the row of a rank


class HostAllReduce(NativeAllReduce):
    """The implementation for the backend "lockstep" across hosts.

    Args:
        group: The group.
        bucket, nodes_by_rank, leaves, cuts, scatter: As for `NativeAllReduce`.
    """

    def __init__(
        self,
        group: HostGroup,
        bucket: Bucket,
        nodes_by_rank: Sequence[Sequence[Node]],
        leaves: int,
        cuts: Sequence[int] | None = None,
        scatter: bool = False,
    ) -> None:
        super().__init__(group.local, bucket, nodes_by_rank, leaves, group.rank, cuts, scatter)
        self._group, self._is_scattered = group, scatter
        self._sum_plan = plan_reduction(group.map, nodes_by_rank, leaves, scatter=scatter)
        self._counts = [len(nodes) for nodes in nodes_by_rank]
        # The row of this rank for the other ranks of the host: fingerprint, handle, flags.
        flags = max(self._counts) * len(bucket.members)
        self._row = torch.zeros(FLAGS_START + flags, dtype=torch.uint8)
        handle = torch.tensor(get_memory_handle(self._packed), dtype=torch.int64)
        self._row[FINGERPRINT_BYTES:FLAGS_START].copy_(handle.view(torch.uint8))
        self._mapped: dict[tuple[int, ...], torch.Tensor] = {}  # memory of other ranks, by handle

    def _packs_all(self) -> bool:
        return True  # another rank of the host may handle this rank's slice

    def _start(self, own: torch.Tensor | None, in_steps: bool) -> Any:
        self._row[FLAGS_START : FLAGS_START + self._flags.numel()].copy_(self._flags)
        return self._group.submit(self._add)

    def advance(self) -> None:
        """Do nothing: the sum continues in the group's thread while the network is busy."""

    def _add(self) -> None:
        """Add the bucket; runs in the thread of the group's sums."""
        group, bucket = self._group, self.bucket
        number = group.begin_sum(bucket.length)
        dtype = str(bucket.dtype).removeprefix("torch.")
        own = CollectiveFingerprint(number, bucket.length, self._digest, dtype)
        term_tag, result_tag, flag_tag = own.tags
        exchange = FingerprintExchange(group.link, group.map, own)
        rows = self._gather_rows(own)
        flags = torch.stack([row[FLAGS_START:] for row in rows.values()])
        sizes = [hi - lo for lo, hi in pairwise(self._bounds)]
        chunk = chunk_length(sizes, bucket.dtype.itemsize)
        presence = Presence(group.link, group.map, self._counts, bucket, flags, flag_tag)
        values = PackedValues(
            group.link, self._map_rows(rows), self._bounds, self._is_scattered, chunk, presence
        )
        ReductionPipeline(
            group.link, self._sum_plan, values, bucket.dtype, sizes, chunk,
            (term_tag, result_tag), lambda: self._compare(own, exchange.wait()),
        ).run()  # fmt: skip
        for member, is_new in enumerate(presence.find_new()):
            self._present[member] = is_new

    def _gather_rows(self, own: CollectiveFingerprint) -> dict[int, torch.Tensor]:
        """Return the rows of the ranks of this host, all of which have packed their nodes."""
        group = self._group
        ranks = group.map.hosts[group.link.host]
        self._row[:FINGERPRINT_BYTES].copy_(own.pack())
        gathered = [torch.empty_like(self._row) for _ in ranks]
        group.local.allgather([gathered], [self._row], AllgatherOptions()).wait()
        rows = dict(zip(ranks, gathered, strict=True))
        self._compare(
            own,
            {
                rank: CollectiveFingerprint.unpack(row[:FINGERPRINT_BYTES])
                for rank, row in rows.items()
            },
        )
        return rows

    def _compare(
        self, own: CollectiveFingerprint, others: Mapping[int, CollectiveFingerprint]
    ) -> None:
        """Raise GroupError if another rank adds something else."""
        group = self._group
        for rank, other in others.items():
            if other != own:
                raise group.fail(
                    f"the ranks of group {group.name} disagree: {group.describe(group.rank)} "
                    f"called {own.describe()}; {group.describe(rank)} called {other.describe()}"
                )

    def _map_rows(self, rows: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the nodes of every rank of the host, a matrix with a row per node."""
        matrices, kept = {self._group.rank: self._values}, {}
        for rank, row in rows.items():
            if rank == self._group.rank:
                continue
            handle = tuple(row[FINGERPRINT_BYTES:FLAGS_START].view(torch.int64).tolist())
            count, length = max(self._counts[rank], 1), self.bucket.length
            if handle not in self._mapped:
                size = count * length * self.bucket.dtype.itemsize
                self._mapped[handle] = self._group.local.map_peer(list(handle), size)
            kept[handle] = self._mapped[handle]
            matrices[rank] = kept[handle].view(self.bucket.dtype).view(count, length)
        self._mapped = kept
        return matrices
