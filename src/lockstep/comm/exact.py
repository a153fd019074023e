"""The exact sum: a bucket added over the ranks along the tree, on any backend.

Every rank holds some nodes of the tree for every tensor of the bucket (one node
each where the ranks divide the leaves evenly, several otherwise). One exchange
brings slice j of all nodes to rank j, which adds them in tree order, element by
element; one gather brings the sums to everybody:

    rank 0 holds {01, 2}    rank 1 holds {3, 45}    rank 2 holds {67}

    (1) launch   all-to-all   rank j receives slice j of 01, 2, 3, 45, 67
    (2) combine  add          slice j of ((01 + (2 + 3)) + (45 + 67))
    (3) gather   all-gather   everybody receives every slice

The traffic is a ring all-reduce's when each rank holds one node, and k times the
first half of it when ranks hold k (1.7 times a ring's for 8 leaves on 3 ranks).
A tensor without a value in some leaf is absent from the sum, not zero, so that
-0.0 stays -0.0: behind each rank's slices one byte for each node and tensor says
whether it is present.

    message of one rank to rank j     | node 0, slice j | node 1, slice j | flags |

The backend "lockstep" does all three in one call, in place, on values that may have
been written where it reads them (`lockstep.comm.native`). On any other, only movement
and addition are asked of the backend and of torch, and a value is copied once, into
the message; the sums are read where they arrive. All bytes travel as `uint8`; each
addition rounds to the tensor's own dtype.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
import torch.distributed as dist

from lockstep.comm.bucket import ALIGNMENT, Bucket, Member, parts, pieces, slice_length
from lockstep.comm.dense import in_format_of, in_layout_of, in_memory_order
from lockstep.comm.native import ABSENT, NEW, STALE, NativeSum, native_backend
from lockstep.comm.transfer import all_gather_single, as_bytes
from lockstep.comm.tree import Node, total

__all__ = [
    "ExactSum",
    "add_lists",
    "add_present",
    "exact_sums",
    "in_format_of",
    "in_layout_of",
    "in_memory_order",
]

Values = Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor | None]
"""The tensors by the index that a bucket's members have; None is absent."""


def add_present(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Add two tensors, in the memory of `left`; what is absent (None) adds nothing."""
    if left is None or right is None:
        return left if right is None else right
    return left.add_(right)


def add_lists(
    left: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Add two lists of tensors, entry by entry, in the memory of the left one."""
    return [add_present(*pair) for pair in zip(left, right, strict=True)]


class ExactSum:
    """The exact sum of one bucket; its buffers are kept and used again.

    `holders` lists the nodes that each rank of the group holds; together they
    cover `leaves` leaves. Ranks must make the same calls in the same order.

    Parameters:
        bucket: the plan, indexing into lists of tensors.
        holders: for every rank of the group, the nodes it holds, ascending.
        leaves: the number of leaves of the tree.
        device: where the tensors lie.
        group: the process group, the default one if None.
        divisor: divide the sum by this number before it is gathered.
        cuts: where the bucket is cut for the ranks; then nothing is gathered, and a
            rank has the sums of its own slice only. On the backend "lockstep" alone.
    """

    def __init__(
        self,
        bucket: Bucket,
        holders: Sequence[Sequence[Node]],
        leaves: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        divisor: int = 1,
        cuts: Sequence[int] = (),
    ) -> None:
        self.bucket = bucket
        self._sum: PortableSum | NativeSum
        native = native_backend(device, bucket.dtype, group)
        if native is None:
            assert not cuts
            self._sum = PortableSum(bucket, holders, leaves, device, group, divisor)
        else:
            rank = dist.get_rank(group)
            self._sum = NativeSum(
                native, bucket, holders, leaves, rank, divisor, cuts or None, bool(cuts)
            )

    def place(self, node: Node, member: Member) -> torch.Tensor | None:
        """Return where a value of one of this rank's nodes may be written before the launch.

        A vector of the member's length, 64-byte aligned; what is given to `launch`
        from there is not copied. None where the backend has no such place. After
        the sum, the first node's places hold the sums.
        """
        return self._sum.place(node, member) if isinstance(self._sum, NativeSum) else None

    def uses(self) -> int:
        """Count who holds the memory of the sums: more than before, and a sum is still in use."""
        return int(torch._C._storage_Use_Count(self._sum.sums.untyped_storage()._cdata))

    def launch(self, held: Mapping[Node, Values], stale: Container[int] = ()) -> None:
        """Begin (1): copy this rank's nodes and start the exchange.

        The tensors whose index is in `stale` count only if some other rank has one
        that is not.

        `held` maps each of this rank's nodes to its tensors, None where absent; the
        bucket's members are picked from it by index.
        """
        self._sum.launch(held, stale)

    def finish_here(self) -> None:
        """Add now, in this thread, what the backend would otherwise add in the background."""
        if isinstance(self._sum, NativeSum):
            self._sum.wait()

    def combine(self) -> None:
        """Do (2) and begin (3): add my slice along the tree, and start the gather."""
        self._sum.combine()

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish (3): return (index, sum) of every member, None where no rank had a new one.

        The sums are vectors in the order of memory that the values were given
        in, 64-byte aligned views of one buffer, until the next launch.
        """
        return self._sum.gather()


class PortableSum:
    """The exact sum of one bucket on any backend; parameters as of `ExactSum`."""

    def __init__(
        self,
        bucket: Bucket,
        holders: Sequence[Sequence[Node]],
        leaves: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        divisor: int,
    ) -> None:
        self.bucket, self.holders, self.leaves = bucket, holders, leaves
        self._group, self._divisor = group, divisor
        self._rank, ranks = dist.get_rank(group), len(holders)
        self._pieces = pieces(bucket, ranks)
        self._length = slice_length(bucket, ranks)
        slice_bytes = self._length * bucket.dtype.itemsize
        # What each rank sends to every other: its nodes' slices, then the flags.
        self._widths = [
            len(nodes) * slice_bytes + -(-len(nodes) * len(bucket.members) // ALIGNMENT) * ALIGNMENT
            for nodes in holders
        ]
        mine = self._widths[self._rank]
        # Zeros once: the gaps between the members are added too, and must stay numbers.
        self._out = torch.zeros(ranks, mine, dtype=torch.uint8, device=device)
        self._in = torch.empty(sum(self._widths), dtype=torch.uint8, device=device)
        self.sums = torch.empty(ranks * self._length, dtype=bucket.dtype, device=device)
        self._work: dist.Work | None = None
        self._present: list[bool] = []

    def launch(self, held: Mapping[Node, Values], stale: Container[int] = ()) -> None:
        """Begin (1): copy this rank's nodes into the message and start the exchange.

        The tensors whose index is in `stale` count only if some other rank has one
        that is not.

        `held` maps each of this rank's nodes to its tensors, None where absent; the
        bucket's members are picked from it by index.
        """
        nodes = self.holders[self._rank]
        members = self.bucket.members
        slices = self._length * self.bucket.dtype.itemsize
        flags = bytearray()
        for number, node in enumerate(nodes):
            values = held[node]
            flags += bytes(
                ABSENT if values[member.index] is None else STALE if member.index in stale else NEW
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
        if flags:
            start = len(nodes) * slices
            presence = torch.frombuffer(flags, dtype=torch.uint8)
            self._out[:, start : start + len(flags)].copy_(presence)
        self._work = dist.all_to_all_single(
            self._in,
            self._out.view(-1),
            output_split_sizes=self._widths,
            input_split_sizes=[self._out.shape[1]] * len(self.holders),
            group=self._group,
            async_op=True,
        )

    def combine(self) -> None:
        """Do (2) and begin (3): add my slice along the tree, and start the gather."""
        assert self._work is not None
        self._work.wait()
        slices, flags = self._received()
        self._present = [NEW in column for column in zip(*flags.values(), strict=True)]
        if all(ABSENT not in row for row in flags.values()):
            whole: dict[Node, torch.Tensor | None] = dict(slices)
            mine = total(whole, self.leaves, add_present)
            assert mine is not None
        else:
            mine = self._combine_members(slices, flags)
        if self._divisor != 1:
            mine.div_(self._divisor)
        self._work = all_gather_single(
            as_bytes(self.sums), as_bytes(mine), group=self._group, async_op=True
        )

    def _received(self) -> tuple[dict[Node, torch.Tensor], dict[Node, list[int]]]:
        """Split what arrived into my slice of every node, and its members' presence."""
        members = len(self.bucket.members)
        slice_bytes = self._length * self.bucket.dtype.itemsize
        slices: dict[Node, torch.Tensor] = {}
        flags: dict[Node, list[int]] = {}
        for nodes, message in zip(self.holders, self._in.split(self._widths), strict=True):
            presence = message[len(nodes) * slice_bytes :].tolist()
            for number, node in enumerate(nodes):
                values = message[number * slice_bytes : (number + 1) * slice_bytes]
                slices[node] = values.view(self.bucket.dtype)
                flags[node] = presence[number * members : (number + 1) * members]
        return slices, flags

    def _combine_members(
        self, slices: Mapping[Node, torch.Tensor], flags: Mapping[Node, Sequence[int]]
    ) -> torch.Tensor:
        """Add member by member, where some are absent from some nodes."""
        mine = torch.zeros(self._length, dtype=self.bucket.dtype, device=self._in.device)
        for piece in self._pieces:
            if piece.slice != self._rank or not self._present[piece.member]:
                continue
            part = slice(piece.offset, piece.offset + piece.stop - piece.start)
            values = {
                node: values[part] if flags[node][piece.member] != ABSENT else None
                for node, values in slices.items()
            }
            added = total(values, self.leaves, add_present)
            assert added is not None
            mine[part] = added
        return mine

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish (3): return (index, sum) of every member, None where no rank had a new one.

        The sums are vectors in the order of memory that the values were given
        in, 64-byte aligned views of one buffer, until the next launch.
        """
        assert self._work is not None
        self._work.wait()
        self._work = None
        return parts(self.bucket, self.sums, self._present)


def exact_sums(
    sums: Sequence[ExactSum], held: Mapping[Node, Values]
) -> list[tuple[int, torch.Tensor | None]]:
    """Add several buckets, the exchange of each overlapping the additions of the one before.

    The order of the calls, the same on every rank, is

        launch 0, launch 1, combine 0, launch 2, combine 1, ..., combine last, gather all
    """
    for number, current in enumerate(sums):
        current.launch(held)
        if number:
            sums[number - 1].combine()
    if sums:
        sums[-1].combine()
    return [pair for each in sums for pair in each.gather()]
