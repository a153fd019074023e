"""The reproducible all-reduce of the backend "lockstep": the same bits, without messages.

Every rank packs its nodes into shared memory, one row per node. On rank j the backend reads slice j
of all rows of all ranks, adds them, and writes the sum to the first row of every rank
(csrc/core/collectives/reproducible_all_reduce.h).

    packed    | node 0: member 0 . member 1 . | node 1: ... | flags of 0 | flags of 1 |
    after it  | the sums of all members       |

A value that was written directly to its destination in a row is not copied. The bucket then costs
one read of all rows and one write of the first row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.backend import load_native, of_group
from lockstep.comm.bucket import ALIGNMENT, Bucket, Member, parts, slice_length
from lockstep.comm.reproducible_all_reduce import (
    ABSENT,
    NEW,
    Held,
    ReproducibleAllReduce,
)
from lockstep.comm.shared_memory import empty_shared
from lockstep.kernel.norm import in_memory_order

__all__ = [
    "DIGEST_BYTES",
    "NativeAllReduce",
    "is_supported",
    "native_backend",
]

DIGEST_BYTES = 8
"""The bytes of a bucket's digest, the end of what `NativeAllReduce.pack` returns."""

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def native_backend(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> Any | None:
    """Return the native backend of the group; None if it does not support such tensors.

    A group whose ranks are on several hosts has none.
    """
    return of_group(group) if is_supported(device, dtype) else None


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the backend "lockstep" adds gradients on this device with this dtype."""
    return device.type == "cpu" and dtype in DTYPES


class NativeAllReduce(ReproducibleAllReduce):
    """The implementation for the backend "lockstep"; arguments as of `make_all_reduce`.

    Args:
        cuts: The bounds of the slices: rank j adds the elements [cuts[j], cuts[j + 1]). None for
            even slices. Cuts do not affect the bits of the sums.
        scatter: Whether a rank gets only the sums of its own slice (a reproducible
            reduce-scatter); the rest of the result is undefined.
    """

    def __init__(
        self,
        native: Any,
        bucket: Bucket,
        nodes_by_rank: Sequence[Sequence[tuple[int, int]]],
        leaves: int,
        rank: int,
        cuts: Sequence[int] | None = None,
        scatter: bool = False,
    ) -> None:
        self._native = native
        self.bucket = bucket
        self._nodes = nodes_by_rank[rank]
        even = slice_length(bucket, len(nodes_by_rank))
        slices = range(len(nodes_by_rank) + 1)
        self._bounds = list(cuts or (min(slice_ * even, bucket.length) for slice_ in slices))
        rows = max(len(self._nodes), 1)  # a rank without nodes needs room for the sums
        values = rows * bucket.length * bucket.dtype.itemsize
        flags = len(self._nodes) * len(bucket.members)
        # Zeroed once, because the gaps between the members are added too and must stay finite.
        self._packed = empty_shared(max(values + flags, 1), dtype=torch.uint8).zero_()
        self._values = self._packed[:values].view(bucket.dtype).view(rows, bucket.length)
        self.sums = self._values[0]
        self._destinations: list[dict[int, torch.Tensor]] = [
            {m.index: row[m.offset : m.offset + m.numel] for m in bucket.members}
            for row in self._values[: len(self._nodes)]
        ]
        self._flags = self._packed[values : values + flags]
        self._packed_flags = bytearray()  # the values of these
        self._present = torch.zeros(max(len(bucket.members), 1), dtype=torch.uint8)
        self._native_bucket = load_native().Bucket(
            bucket.dtype,
            bucket.length,
            [(member.offset, member.numel) for member in bucket.members],
            [list(nodes) for nodes in nodes_by_rank],
            leaves,
            self._bounds,
            scatter,
        )
        self._most_nodes = max(map(len, nodes_by_rank))
        self._mine = self._bounds[rank], self._bounds[rank + 1]
        self._work: dist.Work | None = None

    def destination(self, node: tuple[int, int], member: Member) -> torch.Tensor:
        """Return the destination of a member's value in one of this rank's nodes."""
        return self._destinations[self._nodes.index(node)][member.index]

    def launch(
        self,
        held: Held,
        in_steps: bool = False,
    ) -> None:
        """Copy values to their destinations, and start; see `ReproducibleAllReduce.launch`."""
        own = self._pack(held, all_slices=False)
        self._work = self._native.reproducible_all_reduce(
            self._native_bucket, self._packed, self.sums, self._present, own, in_steps
        )

    def _pack(self, held: Held, all_slices: bool) -> torch.Tensor | None:
        """Copy values and flags to their destinations.

        Returns:
            The values of the first node, if this rank's own slice of them need not be copied.
        """
        flags = bytearray()
        own: torch.Tensor | None = None
        for node, destinations in zip(self._nodes, self._destinations, strict=True):
            values = held[node]
            for index, part in destinations.items():
                value = values[index]
                if value is None:
                    flags.append(ABSENT)
                    continue
                flags.append(NEW)
                if value.data_ptr() == part.data_ptr():
                    continue
                flat = in_memory_order(value)
                if node == self._nodes[0] and self._fills(flat) and not all_slices:
                    own = flat
                    lo, hi = self._mine
                    part[:lo].copy_(flat[:lo])
                    part[hi:].copy_(flat[hi:])
                else:
                    part.copy_(flat)
        if flags != self._packed_flags:  # usually those of the last step
            self._flags.copy_(torch.frombuffer(flags, dtype=torch.uint8))
            self._packed_flags = flags
        return own

    def advance(self) -> None:
        """Take steps of the sums that were launched in steps; see `ReproducibleAllReduce`."""
        self._native.advance()

    def _fills(self, flat: torch.Tensor) -> bool:
        """Return whether a tensor fills the bucket: this rank's slice need not be packed then."""
        return flat.numel() == self.bucket.length and flat.data_ptr() % ALIGNMENT == 0

    def is_completed(self) -> bool:
        """Return whether the sum is complete."""
        return self._work is None or self._work.is_completed()

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish; see `ReproducibleAllReduce.gather`."""
        assert self._work is not None
        self._work.wait()  # a sum that has not started is computed in this thread
        self._work = None
        return self._parts()

    # --- small buckets, which are sent with other messages --------------------------------------

    def fits(self, limit: int) -> bool:
        """Return whether `pack` returns at most `limit` bytes on every rank."""
        values = self.bucket.length * self.bucket.dtype.itemsize
        return self._most_nodes * (values + len(self.bucket.members)) + DIGEST_BYTES <= limit

    def pack(self, held: Held) -> bytes:
        """Return this rank's nodes, to be sent with another message, instead of `launch`."""
        self._pack(held, all_slices=True)
        used = self._values.nbytes + self._flags.numel() if self._nodes else 0
        return self._packed[:used].numpy().tobytes() + self._digest

    def add_packed(self, messages: Sequence[bytes]) -> list[tuple[int, torch.Tensor | None]]:
        """Add the nodes with which the messages of all ranks end; returns what `gather` does."""
        load_native().add_packed(self._native_bucket, messages, self.sums, self._present)
        return self._parts()

    @cached_property
    def _digest(self) -> bytes:
        """The end of the messages, which is compared: it depends on everything in the bucket."""
        digest: bytes = self._native_bucket.digest
        return digest

    def _parts(self) -> list[tuple[int, torch.Tensor | None]]:
        present = self._present[: len(self.bucket.members)].tolist()
        return parts(self.bucket, self.sums, present)
