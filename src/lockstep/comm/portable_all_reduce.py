"""The reproducible all-reduce on any backend: all-to-all, add, all-gather.

An exchange sends slice j of all nodes to rank j, which adds them in tree order, element by element;
a gather sends the sums to all ranks:

    rank 0 holds {01, 2}    rank 1 holds {3, 45}    rank 2 holds {67}

    (1) launch   all-to-all   rank j receives slice j of 01, 2, 3, 45, 67
    (2) combine  add          slice j of ((01 + (2 + 3)) + (45 + 67))
    (3) gather   all-gather   every rank receives every slice

If each rank holds one node, the traffic is that of a ring all-reduce. If ranks hold k nodes, the
exchange is k times larger (for 8 leaves on 3 ranks, 1.7 times a ring in total). One byte per node
and tensor, after the slices of each rank, flags whether the tensor is present.

    message of one rank to rank j     | node 0, slice j | node 1, slice j | flags |

Each value is copied once, into the message, and the sums are views of the received buffer. Messages
are `uint8`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import islice

import torch
import torch.distributed as dist

from lockstep.comm.activity import Waiting
from lockstep.comm.bucket import ALIGNMENT, Bucket, parts, pieces, slice_length
from lockstep.comm.collectives import all_gather_single, as_bytes
from lockstep.comm.reproducible_all_reduce import (
    ABSENT,
    LOCALLY_UNUSED,
    NEW,
    ReproducibleAllReduce,
    Values,
    add_present,
)
from lockstep.kernel.norm import in_memory_order
from lockstep.kernel.tree import Node, total

__all__ = ["PortableAllReduce"]


class PortableAllReduce(ReproducibleAllReduce):
    """The implementation for any backend; arguments as of `make_all_reduce`."""

    def __init__(
        self,
        bucket: Bucket,
        nodes_by_rank: Sequence[Sequence[Node]],
        leaves: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        divisor: int,
    ) -> None:
        self.bucket, self._nodes_by_rank, self._leaves = bucket, nodes_by_rank, leaves
        self._group, self._divisor = group, divisor
        self._rank, ranks = dist.get_rank(group), len(nodes_by_rank)
        self._pieces = pieces(bucket, ranks)
        self._length = slice_length(bucket, ranks)
        slice_bytes = self._length * bucket.dtype.itemsize
        # The bytes that each rank sends to each other rank: slices of its nodes, then flags.
        self._widths = [
            len(nodes) * slice_bytes + -(-len(nodes) * len(bucket.members) // ALIGNMENT) * ALIGNMENT
            for nodes in nodes_by_rank
        ]
        mine = self._widths[self._rank]
        # Zeroed once, because the gaps between the members are added too and must stay finite.
        self._out = torch.zeros(ranks, mine, dtype=torch.uint8, device=device)
        self._in = torch.empty(sum(self._widths), dtype=torch.uint8, device=device)
        self.sums = torch.empty(ranks * self._length, dtype=bucket.dtype, device=device)
        self._work: dist.Work | None = None
        self._present: list[bool] = []
        self._flags = bytearray()

    def launch(
        self,
        held: Mapping[Node, Values],
        locally_unused: Container[int] = (),
        in_steps: bool = False,
    ) -> None:
        """Start step 1; see `ReproducibleAllReduce.launch`."""
        nodes = self._nodes_by_rank[self._rank]
        members = self.bucket.members
        slices = self._length * self.bucket.dtype.itemsize
        flags = bytearray()
        for number, node in enumerate(nodes):
            values = held[node]
            flags += bytes(
                ABSENT
                if values[member.index] is None
                else LOCALLY_UNUSED
                if member.index in locally_unused
                else NEW
                for member in members
            )
            rows = self._out[:, number * slices : (number + 1) * slices].view(self.bucket.dtype)
            flat: dict[int, torch.Tensor] = {}
            for piece in self._pieces:
                value = values[members[piece.member].index]
                if value is None:
                    continue
                if piece.member not in flat:
                    flat[piece.member] = in_memory_order(value)
                source = flat[piece.member][piece.start : piece.stop]
                rows[piece.slice, piece.offset : piece.offset + source.numel()].copy_(source)
        if flags and flags != self._flags:  # usually those of the last step, which are there
            start = len(nodes) * slices
            presence = torch.frombuffer(flags, dtype=torch.uint8)
            # A blocking copy would wait for the backward pass that a GPU still runs.
            self._out[:, start : start + len(flags)].copy_(presence, non_blocking=True)
            self._flags = flags
        self._work = dist.all_to_all_single(
            self._in,
            self._out.view(-1),
            output_split_sizes=self._widths,
            input_split_sizes=[self._out.shape[1]] * len(self._nodes_by_rank),
            group=self._group,
            async_op=True,
        )

    def combine(self) -> None:
        """Do step 2 and start step 3: add this rank's slice along the tree, start the gather."""
        assert self._work is not None
        with Waiting("exchange of gradients"):
            self._work.wait()
        slices, flags = self._received()
        self._present = [NEW in column for column in zip(*flags.values(), strict=True)]
        if all(ABSENT not in row for row in flags.values()):
            whole: dict[Node, torch.Tensor | None] = dict(slices)
            mine = total(whole, self._leaves, add_present)
            assert mine is not None
        else:
            mine = self._combine_members(slices, flags)
        if self._divisor != 1:
            mine.div_(self._divisor)
        self._work = all_gather_single(
            as_bytes(self.sums), as_bytes(mine), group=self._group, async_op=True
        )

    def _received(self) -> tuple[dict[Node, torch.Tensor], dict[Node, list[int]]]:
        """Split the received message into this rank's slice of every node, and the flags."""
        members = len(self.bucket.members)
        slice_bytes = self._length * self.bucket.dtype.itemsize
        slices: dict[Node, torch.Tensor] = {}
        flags: dict[Node, list[int]] = {}
        received = list(zip(self._nodes_by_rank, self._in.split(self._widths), strict=True))
        ends = [
            message[len(nodes) * slice_bytes :][: len(nodes) * members]
            for nodes, message in received
        ]
        presence = iter(torch.cat(ends).tolist())  # one copy to the CPU, which waits for the device
        for nodes, message in received:
            for number, node in enumerate(nodes):
                values = message[number * slice_bytes : (number + 1) * slice_bytes]
                slices[node] = values.view(self.bucket.dtype)
                flags[node] = list(islice(presence, members))
        return slices, flags

    def _combine_members(
        self, slices: Mapping[Node, torch.Tensor], flags: Mapping[Node, Sequence[int]]
    ) -> torch.Tensor:
        """Add member by member, because some members are absent from some nodes."""
        mine = torch.zeros(self._length, dtype=self.bucket.dtype, device=self._in.device)
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

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish step 3; see `ReproducibleAllReduce.gather`."""
        assert self._work is not None
        with Waiting("all_gather of sums of gradients"):
            self._work.wait()
        self._work = None
        return parts(self.bucket, self.sums, self._present)
