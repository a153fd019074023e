"""The reproducible all-reduce on any backend: all-to-all, add, all-gather.

If each rank holds one node, the traffic is that of a ring all-reduce. If ranks hold k nodes, the
exchange is k times larger (for 8 leaves on 3 ranks, 1.7 times a ring in total). The flags follow
the slices in the message to each rank.

    message of one rank to rank j     | node 0, slice j | node 1, slice j | flags |

Each value is copied once, into the message, and the sums are views of the received buffer. Messages
are `uint8`. Their memory is allocated for each exchange, since other buckets need it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lockstep.comm.activity import Waiting
from lockstep.comm.bucket import ALIGNMENT, parts
from lockstep.comm.collectives import all_gather_single
from lockstep.comm.reproducible_all_reduce import Held, ReproducibleAllReduce
from lockstep.comm.slice_plan import SlicePlan
from lockstep.kernel.buffers import as_bytes

__all__ = ["GroupTransport", "PortableAllReduce", "SliceTransport"]


class SliceTransport(Protocol):
    """How rows and sums reach the other ranks."""

    def exchange(self, rows: torch.Tensor, received: torch.Tensor, widths: Sequence[int]) -> Any:
        """Start to send row j to rank j; return the work.

        Args:
            rows: The rows of this rank.
            received: Memory for a row of each rank, one after another.
            widths: The bytes of these rows.
        """

    def gather(self, mine: torch.Tensor, sums: torch.Tensor) -> Any:
        """Start to send the sum of this rank's slice to all ranks, into `sums`; return the work."""


class GroupTransport:
    """The collectives of a process group.

    Args:
        group: The process group; None is the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def exchange(self, rows: torch.Tensor, received: torch.Tensor, widths: Sequence[int]) -> Any:
        """Start an all-to-all; see `SliceTransport`."""
        return dist.all_to_all_single(
            received,
            rows.view(-1),
            output_split_sizes=list(widths),
            input_split_sizes=[rows.shape[1]] * len(rows),
            group=self._group,
            async_op=True,
        )

    def gather(self, mine: torch.Tensor, sums: torch.Tensor) -> Any:
        """Start an all-gather; see `SliceTransport`."""
        return all_gather_single(as_bytes(sums), as_bytes(mine), group=self._group, async_op=True)


class PortableAllReduce(ReproducibleAllReduce):
    """The implementation for any backend.

    Args:
        plan: The plan of the bucket.
        transport: How rows and sums reach the other ranks.
        device: The device of the tensors.
        sums: The memory of the sums; None for memory of its own.
    """

    def __init__(
        self,
        plan: SlicePlan,
        transport: SliceTransport,
        device: torch.device,
        sums: torch.Tensor | None = None,
    ) -> None:
        self.bucket = plan.bucket
        self.sums = plan.make_sums(device) if sums is None else sums
        self._plan = plan
        self._transport = transport
        self._device = device
        # The bytes that each rank sends to each other rank: slices of its nodes, then flags.
        self._widths = [
            len(nodes) * plan.slice_bytes
            + -(-len(nodes) * len(self.bucket.members) // ALIGNMENT) * ALIGNMENT
            for nodes in plan.nodes_by_rank
        ]
        self._make_rows = torch.zeros if plan.has_gaps else torch.empty
        self._rows: torch.Tensor
        self._received: torch.Tensor
        self._work: Any = None

    def launch(self, held: Held, in_steps: bool = False) -> None:
        """Allocate the messages, pack this rank's nodes and their flags, and start the exchange."""
        plan = self._plan
        self._rows = self._make_rows(
            (plan.ranks, self._widths[plan.rank]), dtype=torch.uint8, device=self._device
        )
        self._received = torch.empty(sum(self._widths), dtype=torch.uint8, device=self._device)
        flags = plan.pack(held, self._rows)
        if flags:  # they follow the slices of each row
            start = len(plan.nodes_by_rank[plan.rank]) * plan.slice_bytes
            presence = torch.frombuffer(flags, dtype=torch.uint8)
            # A blocking copy would wait for the backward pass that a GPU still runs.
            self._rows[:, start : start + len(flags)].copy_(presence, non_blocking=True)
        self._work = self._transport.exchange(self._rows, self._received, self._widths)

    def combine(self) -> None:
        """Do step 2 and start step 3: add this rank's slice along the tree, start the gather."""
        with Waiting("exchange of gradients"):
            self._work.wait()
        rows = self._received.split(self._widths)
        mine = self._plan.add(rows, self._read_flags(rows))
        self._work = self._transport.gather(mine, self.sums)  # which refers to its memory
        del self._rows, self._received

    def _read_flags(self, rows: Sequence[torch.Tensor]) -> list[list[int]]:
        """Return the flags of each rank, which follow the slices in its row."""
        nodes_by_rank = self._plan.nodes_by_rank
        counts = [len(nodes) * len(self.bucket.members) for nodes in nodes_by_rank]
        starts = [len(nodes) * self._plan.slice_bytes for nodes in nodes_by_rank]
        ends = [
            row[start : start + count]
            for row, start, count in zip(rows, starts, counts, strict=True)
        ]
        presence = iter(torch.cat(ends).tolist())  # one copy to the CPU, which waits for the device
        return [list(islice(presence, count)) for count in counts]

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish step 3; see `ReproducibleAllReduce.gather`."""
        with Waiting("all_gather of sums of gradients"):
            self._work.wait()
        self._work = None
        return parts(self.bucket, self.sums, self._plan.present)
