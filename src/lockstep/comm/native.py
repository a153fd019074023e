"""The exact sum on the backend "lockstep": the same bits, without an exchange of messages.

Every rank packs its nodes into shared memory; the backend adds slice j on rank j,
straight from everybody's memory into everybody's first row (csrc/collectives/exact_sum.h).

    packed    | node 0: member 0 . member 1 . | node 1: ... | flags of 0 | flags of 1 |
    after it  | the sums of all members       |

A value that was written into its place in a row, instead of private memory, is not
copied: the bucket then costs one reading of all rows and one writing of the first.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm import backend
from lockstep.comm.bucket import ALIGNMENT, Bucket, Member, parts, slice_length
from lockstep.comm.dense import in_memory_order
from lockstep.comm.memory import empty
from lockstep.comm.tree import Node

__all__ = ["ABSENT", "NEW", "STALE", "NativeSum", "native_backend"]

ABSENT, NEW, STALE = 0, 1, 2
"""What a flag says of a tensor in a node."""

Values = Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor | None]
"""As in `lockstep.comm.exact`."""

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def native_backend(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> Any | None:
    """Return the group's backend if it adds such tensors exactly by itself, else None."""
    if device.type != "cpu" or dtype not in DTYPES:
        return None
    return backend.of_group(group)


class NativeSum:
    """The exact sum of one bucket on the backend "lockstep"; parameters as of `ExactSum`.

    `cuts` says which elements each rank adds: rank j elements [cuts[j], cuts[j + 1]),
    from 0 to the bucket's length, one number more than ranks; even slices if None.
    With `scatter` a rank gets only the sums of its own slice (an exact
    reduce-scatter), and the rest of the result means nothing. Cuts change no bits.
    """

    def __init__(
        self,
        native: Any,
        bucket: Bucket,
        holders: Sequence[Sequence[Node]],
        leaves: int,
        rank: int,
        divisor: int,
        cuts: Sequence[int] | None = None,
        scatter: bool = False,
    ) -> None:
        self._native, self._bucket = native, bucket
        self._nodes = holders[rank]
        even, ranks = slice_length(bucket, len(holders)), range(len(holders) + 1)
        bounds = list(cuts or (min(each * even, bucket.length) for each in ranks))
        rows = max(len(self._nodes), 1)  # who holds nothing needs room for the sums
        values = rows * bucket.length * bucket.dtype.itemsize
        flags = len(self._nodes) * len(bucket.members)
        # Zeros once: the gaps between the members are added too, and must stay numbers.
        self._packed = empty(max(values + flags, 1), dtype=torch.uint8).zero_()
        self._values = self._packed[:values].view(bucket.dtype).view(rows, bucket.length)
        self.sums = self._values[0]
        self._flags = self._packed[values : values + flags]
        self._present = torch.zeros(max(len(bucket.members), 1), dtype=torch.uint8)
        self._plan = {
            "length": bucket.length,
            "members": [(member.offset, member.numel) for member in bucket.members],
            "holders": [list(nodes) for nodes in holders],
            "leaves": leaves,
            "divisor": float(divisor),
            "cuts": bounds,
            "scatter": scatter,
        }
        self._mine = bounds[rank], bounds[rank + 1]
        self._work: dist.Work | None = None

    def place(self, node: Node, member: Member) -> torch.Tensor:
        """Return where a member's value in one of this rank's nodes belongs, a vector."""
        row = self._values[self._nodes.index(node)]
        return row[member.offset : member.offset + member.numel]

    def launch(self, held: Mapping[Node, Values], stale: Container[int] = ()) -> None:
        """Bring what is not there yet into shared memory, and start the sum; as in `ExactSum`."""
        flags = bytearray()
        own: torch.Tensor | None = None
        for node, row in zip(self._nodes, self._values, strict=False):
            values = held[node]
            for member in self._bucket.members:
                value = values[member.index]
                if value is None:
                    flags.append(ABSENT)
                    continue
                flags.append(STALE if member.index in stale else NEW)
                part = row[member.offset : member.offset + member.numel]
                if value.data_ptr() == part.data_ptr():
                    continue
                flat = in_memory_order(value)
                if node == self._nodes[0] and self._fills(flat):
                    own = flat
                    lo, hi = self._mine
                    part[:lo].copy_(flat[:lo])
                    part[hi:].copy_(flat[hi:])
                else:
                    part.copy_(flat)
        if flags:
            self._flags.copy_(torch.frombuffer(flags, dtype=torch.uint8))
        self._work = self._native.exact_sum(
            self._packed, self.sums, self._present, **self._plan, own=own
        )

    def _fills(self, flat: torch.Tensor) -> bool:
        """Tell whether a tensor is the whole bucket: nobody else reads this rank's slice of it."""
        return flat.numel() == self._bucket.length and flat.data_ptr() % ALIGNMENT == 0

    def wait(self) -> None:
        """Wait for the sum, and compute this rank's part of it in this thread if nobody has."""
        assert self._work is not None
        self._work.wait()

    def combine(self) -> None:
        """Nothing is left to be done between the start and the end."""

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish, and return (index, sum) of every member as `ExactSum.gather` does."""
        self.wait()
        self._work = None
        present = self._present[: len(self._bucket.members)].tolist()
        return parts(self._bucket, self.sums, present)
