"""The exact sum on the backend "lockstep": the same bits, without an exchange of messages.

Every rank packs its nodes into shared memory; the backend adds slice j on rank j,
straight from everybody's memory into everybody's result (csrc/collectives/exact_sum.h).

    packed    | node 0: member 0 . member 1 . | node 1: ... | flags of 0 | flags of 1 |
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm import backend
from lockstep.comm.bucket import Bucket, parts
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
    if device.type != "cpu" or dtype not in DTYPES or not backend.available():
        return None
    found = (group or dist.group.WORLD)._get_backend(device)  # type: ignore[union-attr]
    return found if isinstance(found, backend.load().LockstepBackend) else None


class NativeSum:
    """The exact sum of one bucket on the backend "lockstep"; parameters as of `ExactSum`."""

    def __init__(
        self,
        native: Any,
        bucket: Bucket,
        holders: Sequence[Sequence[Node]],
        leaves: int,
        rank: int,
        divisor: int,
    ) -> None:
        self._native, self._bucket = native, bucket
        self._nodes = holders[rank]
        values = len(self._nodes) * bucket.length * bucket.dtype.itemsize
        flags = len(self._nodes) * len(bucket.members)
        # Zeros once: the gaps between the members are added too, and must stay numbers.
        self._packed = empty(max(values + flags, 1), dtype=torch.uint8).zero_()
        self._values = (
            self._packed[:values].view(bucket.dtype).view(len(self._nodes), bucket.length)
        )
        self._flags = self._packed[values : values + flags]
        self._present = torch.zeros(max(len(bucket.members), 1), dtype=torch.uint8)
        self._plan = {
            "length": bucket.length,
            "members": [(member.offset, member.numel) for member in bucket.members],
            "holders": [list(nodes) for nodes in holders],
            "leaves": leaves,
            "divisor": float(divisor),
        }
        self._work: dist.Work | None = None

    def launch(self, held: Mapping[Node, Values], stale: Container[int] = ()) -> None:
        """Copy this rank's nodes into shared memory and start the sum; as in `ExactSum`."""
        flags = bytearray()
        for node, row in zip(self._nodes, self._values, strict=True):
            values = held[node]
            for member in self._bucket.members:
                value = values[member.index]
                if value is None:
                    flags.append(ABSENT)
                else:
                    flags.append(STALE if member.index in stale else NEW)
                    part = row[member.offset : member.offset + member.numel]
                    part.copy_(in_memory_order(value))
        if flags:
            self._flags.copy_(torch.frombuffer(flags, dtype=torch.uint8))
        # New memory each time: somebody may hold on to the sums of the step before.
        self._result = empty(max(self._bucket.length, 1), dtype=self._bucket.dtype)
        self._work = self._native.exact_sum(self._packed, self._result, self._present, **self._plan)

    def combine(self) -> None:
        """Nothing is left to be done between the start and the end."""

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish, and return (index, sum) of every member as `ExactSum.gather` does."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        present = self._present[: len(self._bucket.members)].tolist()
        return parts(self._bucket, self._result, present)
