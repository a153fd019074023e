"""The reproducible all-reduce of two ranks that hold one node each: torch's own all-reduce.

The tree ends in one addition, and left + right has the bits of right + left, so that any all-reduce
is exact here. Gradients that are written to their destinations are added where they are.

    sums    | member 0 ... | member 1 ... | presence of 0 | of 1 |    1.0 if this rank has a value

A member that a rank does not have is -0.0 there: only this number leaves all others as they are,
-0.0 included. Its presence, a number that is added, too, says whether any rank has it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.activity import Waiting
from lockstep.comm.bucket import Bucket, Member, parts
from lockstep.comm.reproducible_all_reduce import Held, ReproducibleAllReduce
from lockstep.kernel.norm import in_memory_order

__all__ = ["PairAllReduce"]


class PairAllReduce(ReproducibleAllReduce):
    """The implementation for two ranks with one node each.

    Args:
        bucket: The planned bucket.
        device: The device of the tensors.
        group: The process group of two ranks; None is the default group.
    """

    def __init__(
        self, bucket: Bucket, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self.bucket = bucket
        # Zeros, because the gaps between the members are added, too, and must stay finite.
        size = bucket.length + len(bucket.members)
        self.sums = torch.zeros(size, dtype=bucket.dtype, device=device)
        self._destinations = {
            m.index: self.sums[m.offset : m.offset + m.numel] for m in bucket.members
        }
        self._presence = self.sums[bucket.length :]
        self._group = group
        self._work: Any = None

    def destination(self, node: tuple[int, int], member: Member) -> torch.Tensor:
        """Return the destination of a member's value in the node of this rank."""
        return self._destinations[member.index]

    def launch(self, held: Held, in_steps: bool = False) -> None:
        """Copy values to their destinations, and start; see `ReproducibleAllReduce.launch`."""
        (values,) = held.values()
        presence: list[float] = []
        for index, part in self._destinations.items():
            value = values[index]
            presence.append(float(value is not None))
            if value is None:
                part.fill_(-0.0)
            elif value.data_ptr() != part.data_ptr():
                part.copy_(in_memory_order(value))
        self._presence.copy_(torch.tensor(presence))
        self._work = dist.all_reduce(self.sums, group=self._group, async_op=True)

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish; see `ReproducibleAllReduce.gather`."""
        with Waiting("all_reduce of gradients"):
            self._work.wait()
        self._work = None
        return parts(self.bucket, self.sums, self._presence.tolist())
