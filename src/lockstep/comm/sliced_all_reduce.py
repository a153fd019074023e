"""The plan and the additions of a reproducible all-reduce in which each rank adds one slice.

    rank 0 holds {01, 2}    rank 1 holds {3, 45}    rank 2 holds {67}

    (1) launch   exchange     rank j gets slice j of 01, 2, 3, 45, 67
    (2) combine  add          slice j of ((01 + (2 + 3)) + (45 + 67))
    (3) gather   all-gather   every rank gets every slice

A rank packs slice j of all its nodes for rank j, in row j of its memory. How the rows and the sums
reach the other ranks is up to the subclasses. A flag per node and tensor says whether the tensor is
present.

    row j    | node 0, slice j | node 1, slice j |
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lockstep.comm.bucket import Bucket, pieces, slice_length
from lockstep.comm.reproducible_all_reduce import (
    ABSENT,
    NEW,
    Held,
    ReproducibleAllReduce,
)
from lockstep.kernel.norm import in_memory_order
from lockstep.kernel.tree import Node, add_present, total

__all__ = ["SlicedAllReduce"]


class SlicedAllReduce(ReproducibleAllReduce):
    """The implementations in which a rank adds a slice; arguments as of `make_all_reduce`.

    Args:
        group: The process group; None is the default group.
        rank: This rank; None for that in the process group.
        sums: The memory of the sums; None for memory of its own.
    """

    _rows: torch.Tensor
    """The memory into which nodes are packed: a row of bytes for each rank."""

    def __init__(
        self,
        bucket: Bucket,
        nodes_by_rank: Sequence[Sequence[Node]],
        leaves: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        rank: int | None = None,
        sums: torch.Tensor | None = None,
    ) -> None:
        self.bucket = bucket
        self._nodes_by_rank = nodes_by_rank
        self._leaves = leaves
        self._group = group
        self._rank = dist.get_rank(group) if rank is None else rank
        self._ranks = len(nodes_by_rank)
        self._pieces = pieces(bucket, self._ranks)
        self._length = slice_length(bucket, self._ranks)
        self._slice_bytes = self._length * bucket.dtype.itemsize
        if sums is None:
            sums = torch.empty(self._ranks * self._length, dtype=bucket.dtype, device=device)
        self.sums = sums
        self._present: list[bool] = []
        self._allocate(device)

    @abstractmethod
    def _allocate(self, device: torch.device) -> None:
        """Prepare the rows, zeroed: gaps between members are added too and must stay finite."""

    @abstractmethod
    def _start(self, flags: bytearray) -> None:
        """Start step 1, given the flags of the nodes in the rows."""

    def launch(
        self,
        held: Held,
        in_steps: bool = False,
    ) -> None:
        """Pack this rank's nodes and start step 1; see `ReproducibleAllReduce.launch`."""
        self._start(self._pack(held))

    def _pack(self, held: Held) -> bytearray:
        """Copy this rank's nodes into the rows, and return their flags."""
        members = self.bucket.members
        flags = bytearray()
        for number, node in enumerate(self._nodes_by_rank[self._rank]):
            values = held[node]
            flags += bytes(ABSENT if values[member.index] is None else NEW for member in members)
            slices = self._rows[:, number * self._slice_bytes : (number + 1) * self._slice_bytes]
            slices = slices.view(self.bucket.dtype)
            flat: dict[int, torch.Tensor] = {}
            for piece in self._pieces:
                value = values[members[piece.member].index]
                if value is None:
                    continue
                if piece.member not in flat:
                    flat[piece.member] = in_memory_order(value)
                source = flat[piece.member][piece.start : piece.stop]
                slices[piece.slice, piece.offset : piece.offset + source.numel()].copy_(source)
        return flags

    def _add(
        self, rows: Sequence[torch.Tensor], flags_by_rank: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Return the sum of this rank's slice along the tree, in memory of the rows or new memory.

        Args:
            rows: The row of each rank for this one; their memory may be overwritten.
            flags_by_rank: The flags of each rank, node by node.
        """
        slices: dict[Node, torch.Tensor] = {}
        flags: dict[Node, Sequence[int]] = {}
        members = len(self.bucket.members)
        for nodes, row, presence in zip(self._nodes_by_rank, rows, flags_by_rank, strict=True):
            for number, node in enumerate(nodes):
                values = row[number * self._slice_bytes : (number + 1) * self._slice_bytes]
                slices[node] = values.view(self.bucket.dtype)
                flags[node] = presence[number * members : (number + 1) * members]
        self._present = [NEW in column for column in zip(*flags.values(), strict=True)]
        if all(ABSENT not in presence for presence in flags.values()):
            whole: dict[Node, torch.Tensor | None] = dict(slices)
            mine = total(whole, self._leaves, add_present)
            assert mine is not None
        else:
            mine = self._add_members(slices, flags)
        return mine

    def _add_members(
        self, slices: Mapping[Node, torch.Tensor], flags: Mapping[Node, Sequence[int]]
    ) -> torch.Tensor:
        """Add member by member, because some members are absent from some nodes."""
        mine = torch.zeros(self._length, dtype=self.bucket.dtype, device=self.sums.device)
        for piece in self._pieces:
            if piece.slice != self._rank or not self._present[piece.member]:
                continue
            part = slice(piece.offset, piece.offset + piece.stop - piece.start)
            values = {
                node: values[part] if flags[node][piece.member] != ABSENT else None
                for node, values in slices.items()
            }
            added = total(values, self._leaves, add_present)
            assert added is not None
            mine[part] = added
        return mine
