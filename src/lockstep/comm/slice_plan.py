"""The plan and the additions of a reproducible all-reduce in which each rank adds one slice.

    rank 0 holds {01, 2}    rank 1 holds {3, 45}    rank 2 holds {67}

    (1) launch   exchange     rank j gets slice j of 01, 2, 3, 45, 67
    (2) combine  add          slice j of ((01 + (2 + 3)) + (45 + 67))
    (3) gather   all-gather   every rank gets every slice

A rank packs slice j of all its nodes for rank j, in row j of its memory. How the rows and the sums
reach the other ranks is up to the all-reduce that has the plan. A flag per node and tensor says
whether the tensor is present.

    row j    | node 0, slice j | node 1, slice j |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lockstep.comm.bucket import Bucket, pieces, slice_length
from lockstep.comm.reproducible_all_reduce import ABSENT, NEW, Held
from lockstep.kernel.norm import in_memory_order
from lockstep.kernel.tree import Node, add_present, total

__all__ = ["SlicePlan"]


class SlicePlan:
    """How a rank packs its nodes into slices, and adds its own slice of all nodes.

    Args:
        bucket: The planned bucket.
        nodes_by_rank: The nodes that each rank holds, ascending.
        leaves: The number of leaves of the tree.
        rank: This rank.

    Attributes:
        ranks: The number of ranks.
        length: The elements of a slice.
        slice_bytes: The bytes of a slice.
        present: Whether each member of the bucket is present, after `add`.
    """

    def __init__(
        self, bucket: Bucket, nodes_by_rank: Sequence[Sequence[Node]], leaves: int, rank: int
    ) -> None:
        self.bucket = bucket
        self.nodes_by_rank = nodes_by_rank
        self.rank = rank
        self.ranks = len(nodes_by_rank)
        self.length = slice_length(bucket, self.ranks)
        self.slice_bytes = self.length * bucket.dtype.itemsize
        self.present: list[bool] = []
        self._leaves = leaves
        self._pieces = pieces(bucket, self.ranks)

    @property
    def has_gaps(self) -> bool:
        """Whether slices have elements of no member, which are added, too: rows begin as zeros."""
        filled = sum(piece.stop - piece.start for piece in self._pieces)
        return filled < self.ranks * self.length

    def make_sums(self, device: torch.device) -> torch.Tensor:
        """Return memory for the sums, one slice after another."""
        return torch.empty(self.ranks * self.length, dtype=self.bucket.dtype, device=device)

    def pack(self, held: Held, rows: torch.Tensor) -> bytearray:
        """Copy this rank's nodes into rows of bytes, one for each rank; return their flags."""
        members = self.bucket.members
        flags = bytearray()
        for number, node in enumerate(self.nodes_by_rank[self.rank]):
            values = held[node]
            flags += bytes(ABSENT if values[member.index] is None else NEW for member in members)
            slices = rows[:, number * self.slice_bytes : (number + 1) * self.slice_bytes]
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

    def add(
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
        for nodes, row, presence in zip(self.nodes_by_rank, rows, flags_by_rank, strict=True):
            for number, node in enumerate(nodes):
                values = row[number * self.slice_bytes : (number + 1) * self.slice_bytes]
                slices[node] = values.view(self.bucket.dtype)
                flags[node] = presence[number * members : (number + 1) * members]
        self.present = [NEW in column for column in zip(*flags.values(), strict=True)]
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
        mine = torch.zeros_like(next(iter(slices.values())))
        for piece in self._pieces:
            if piece.slice != self.rank or not self.present[piece.member]:
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
