"""Reproducible all-reduce: a bucket is added over the ranks along the tree, on any backend.

Each rank holds some nodes of the tree for every tensor of the bucket: one node if the ranks
divide the leaves evenly, several otherwise. An exchange sends slice j of all nodes to rank j,
which adds them in tree order, element by element; a gather sends the sums to all ranks:

    rank 0 holds {01, 2}    rank 1 holds {3, 45}    rank 2 holds {67}

    (1) launch   all-to-all   rank j receives slice j of 01, 2, 3, 45, 67
    (2) combine  add          slice j of ((01 + (2 + 3)) + (45 + 67))
    (3) gather   all-gather   every rank receives every slice

If each rank holds one node, the traffic is that of a ring all-reduce. If ranks hold k nodes, the
exchange is k times larger (for 8 leaves on 3 ranks, 1.7 times a ring in total). A tensor without a
value in some leaf is absent from the sum, not zero, so that -0.0 stays -0.0. One byte per node and
tensor, after the slices of each rank, flags whether the tensor is present.

    message of one rank to rank j     | node 0, slice j | node 1, slice j | flags |

The backend "lockstep" does all three steps in one call, in place, on values that may have been
written directly to their destination (`lockstep.comm.native_all_reduce`, and across hosts
`lockstep.comm.hosts.all_reduce`). On other backends, each
value is copied once, into the message, and the sums are views of the received buffer. Messages are
`uint8`; each addition rounds to the dtype of the tensor.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import islice

import torch
import torch.distributed as dist

from lockstep.comm import backend
from lockstep.comm.activity import Waiting
from lockstep.comm.bucket import ALIGNMENT, Bucket, Member, parts, pieces, slice_length
from lockstep.comm.collectives import all_gather_single, as_bytes, has_many_ranks
from lockstep.comm.hosts.all_reduce import HostAllReduce
from lockstep.comm.memory_format import in_format_of, in_layout_of
from lockstep.comm.native_all_reduce import (
    ABSENT,
    NEW,
    STALE,
    NativeAllReduce,
    is_supported,
    native_backend,
)
from lockstep.kernel.norm import in_memory_order
from lockstep.kernel.tree import Node, total

__all__ = [
    "ReproducibleAllReduce",
    "add_lists",
    "add_present",
    "adds_in_place",
    "in_format_of",
    "in_layout_of",
    "in_memory_order",
    "reproducible_all_reduce",
]

Values = Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor | None]
"""Tensors by the index of their bucket member; None if absent."""


def adds_in_place(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> bool:
    """Return whether such tensors are added where they were packed, in shared memory."""
    return is_supported(device, dtype) and (
        backend.of_group(group) is not None or backend.hosts_backend_of(group) is not None
    )


def add_present(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two tensors, in the memory of `left`; None stands for an absent tensor."""
    if left is None or right is None:
        return left if right is None else right
    return left.add_(right)


def add_lists(
    left: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Add two lists of tensors entry by entry, into the memory of the left one."""
    return [add_present(*pair) for pair in zip(left, right, strict=True)]


class ReproducibleAllReduce:
    """The reproducible all-reduce of one bucket; its buffers are reused.

    Ranks must make the same calls in the same order.

    Attributes:
        fits_messages: Whether every rank may `pack` its nodes and send them with another message:
            on the backend "lockstep", if half of its longest message can contain them, and if one
            call gathers the messages of the ranks.

    Args:
        bucket: The planned bucket; its members refer to tensors by index.
        holders: The nodes that each rank of the group holds, ascending. Together they cover all
            leaves.
        leaves: The number of leaves of the tree.
        device: The device of the tensors.
        group: The process group; None is the default group.
        divisor: The number by which the sum is divided before it is gathered.
        cuts: The bounds of the ranks' slices. If given, nothing is gathered, and a rank has only
            the sums of its own slice (backend "lockstep" only).
        compression: How sums are compressed between hosts, on the backend "lockstep"; see
            `lockstep.comm.hosts.compression`.
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
        compression: str | None = None,
    ) -> None:
        self.bucket = bucket
        self._sum: PortableAllReduce | NativeAllReduce
        native = native_backend(device, bucket.dtype, group)
        hosts = backend.hosts_backend_of(group) if is_supported(device, bucket.dtype) else None
        options = divisor, cuts or None, bool(cuts)
        self.fits_messages = False
        if native is not None:
            rank = dist.get_rank(group)
            self._sum = NativeAllReduce(native, bucket, holders, leaves, rank, *options)
            may_send = not cuts and not has_many_ranks(group)
            self.fits_messages = may_send and self._sum.fits(native.longest_message // 2)
        elif hosts is not None:
            self._sum = HostAllReduce(
                hosts.calls.group, hosts.calls.reducer, hosts.reproducible_all_reduce,
                bucket, holders, leaves, *options, compression,
            )  # fmt: skip
        else:
            assert not cuts
            self._sum = PortableAllReduce(bucket, holders, leaves, device, group, divisor)

    def place(self, node: Node, member: Member) -> torch.Tensor | None:
        """Return the destination of a value of one of this rank's nodes, or None.

        The destination is a vector of the member's length, aligned to 64 bytes. `launch` does not
        copy values that are already there. Only the backend "lockstep" has destinations; the
        destinations of the first node later hold the sums.
        """
        return self._sum.place(node, member) if isinstance(self._sum, NativeAllReduce) else None

    @property
    def sums(self) -> torch.Tensor:
        """The sums of all members, as a vector; valid between `gather` and the next launch."""
        return self._sum.sums

    def uses(self) -> int:
        """Return the reference count of the memory of the sums, to detect sums that are in use."""
        return int(torch._C._storage_Use_Count(self.sums.untyped_storage()._cdata))

    def launch(
        self, held: Mapping[Node, Values], stale: Container[int] = (), in_steps: bool = False
    ) -> None:
        """Start step 1: copy this rank's nodes and start the exchange.

        Args:
            held: The tensors of each of this rank's nodes, by index; None if absent.
            stale: The indices of tensors that count only if another rank has a tensor that is
                not stale.
            in_steps: Whether the backend "lockstep" does not add in a background thread, but in
                this one, in `advance`. It avoids that both take turns on one core.
        """
        if isinstance(self._sum, NativeAllReduce):
            self._sum.launch(held, stale, in_steps)
        else:
            self._sum.launch(held, stale)

    def pack(self, held: Mapping[Node, Values]) -> bytes:
        """Return this rank's nodes, to be sent with another message, instead of `launch`.

        Only if `fits_messages` is true.
        """
        assert isinstance(self._sum, NativeAllReduce)
        return self._sum.pack(held)

    def add_packed(self, messages: Sequence[bytes]) -> list[tuple[int, torch.Tensor | None]]:
        """Add the nodes with which the messages of all ranks end, instead of waiting for them.

        Returns:
            What `gather` returns.

        Raises:
            UsageError: A message ends with something else.
        """
        assert isinstance(self._sum, NativeAllReduce)
        return self._sum.add_packed(messages)

    def advance(self) -> None:
        """Add what the other ranks are ready for, of all sums of the group launched in steps.

        Does not wait; the last steps are taken by `gather`.
        """
        if isinstance(self._sum, NativeAllReduce):
            self._sum.advance()

    def combine(self) -> None:
        """Do step 2 and start step 3: add this rank's slice along the tree, start the gather."""
        self._sum.combine()

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish step 3.

        Returns:
            (index, sum) of every member; None if no rank had a value that is not stale. A sum
            is a vector in the memory order of the values, an aligned view of a buffer that is
            valid until the next launch.
        """
        return self._sum.gather()


class PortableAllReduce:
    """The implementation for any backend; the arguments are as in `ReproducibleAllReduce`."""

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
        # The bytes that each rank sends to each other rank: slices of its nodes, then flags.
        self._widths = [
            len(nodes) * slice_bytes + -(-len(nodes) * len(bucket.members) // ALIGNMENT) * ALIGNMENT
            for nodes in holders
        ]
        mine = self._widths[self._rank]
        # Zeroed once, because the gaps between the members are added too and must stay finite.
        self._out = torch.zeros(ranks, mine, dtype=torch.uint8, device=device)
        self._in = torch.empty(sum(self._widths), dtype=torch.uint8, device=device)
        self.sums = torch.empty(ranks * self._length, dtype=bucket.dtype, device=device)
        self._work: dist.Work | None = None
        self._present: list[bool] = []
        self._flags = bytearray()

    def launch(self, held: Mapping[Node, Values], stale: Container[int] = ()) -> None:
        """Start step 1; see `ReproducibleAllReduce.launch`."""
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
            input_split_sizes=[self._out.shape[1]] * len(self.holders),
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
        """Split the received message into this rank's slice of every node, and the flags."""
        members = len(self.bucket.members)
        slice_bytes = self._length * self.bucket.dtype.itemsize
        slices: dict[Node, torch.Tensor] = {}
        flags: dict[Node, list[int]] = {}
        received = list(zip(self.holders, self._in.split(self._widths), strict=True))
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
            added = total(values, self.leaves, add_present)
            assert added is not None
            mine[part] = added
        return mine

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish step 3.

        Returns:
            (index, sum) of every member; None if no rank had a value that is not stale. A sum
            is a vector in the memory order of the values, an aligned view of a buffer that is
            valid until the next launch.
        """
        assert self._work is not None
        with Waiting("all_gather of sums of gradients"):
            self._work.wait()
        self._work = None
        return parts(self.bucket, self.sums, self._present)


def reproducible_all_reduce(
    sums: Sequence[ReproducibleAllReduce], held: Mapping[Node, Values]
) -> list[tuple[int, torch.Tensor | None]]:
    """Reduce several buckets; the exchange of each overlaps the additions of the previous one.

    The order of the calls is the same on every rank:

        launch 0, launch 1, combine 0, launch 2, combine 1, ..., combine last, gather all
    """
    for number, current in enumerate(sums):
        current.launch(held)
        if number:
            sums[number - 1].combine()
    if sums:
        sums[-1].combine()
    return [pair for each in sums for pair in each.gather()]
