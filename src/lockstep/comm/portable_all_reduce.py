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
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.activity import Waiting
from lockstep.comm.bucket import ALIGNMENT, parts
from lockstep.comm.collectives import all_gather_single, as_bytes
from lockstep.comm.reproducible_all_reduce import Held
from lockstep.comm.sliced_all_reduce import SlicedAllReduce

__all__ = ["PortableAllReduce"]


class PortableAllReduce(SlicedAllReduce):
    """The implementation for any backend; arguments as of `SlicedAllReduce`."""

    def _allocate(self, device: torch.device) -> None:
        # The bytes that each rank sends to each other rank: slices of its nodes, then flags.
        self._widths = [
            len(nodes) * self._slice_bytes
            + -(-len(nodes) * len(self.bucket.members) // ALIGNMENT) * ALIGNMENT
            for nodes in self._nodes_by_rank
        ]
        self._device = device
        # Without gaps, every byte of a slice is written.
        filled = sum(piece.stop - piece.start for piece in self._pieces)
        self._has_gaps = filled < self._ranks * self._length
        self._in: torch.Tensor
        self._work: Any = None

    def launch(self, held: Held, in_steps: bool = False) -> None:
        """Allocate the messages, pack this rank's nodes, and start the all-to-all."""
        make = torch.zeros if self._has_gaps else torch.empty
        shape = self._ranks, self._widths[self._rank]
        self._rows = make(shape, dtype=torch.uint8, device=self._device)
        self._in = torch.empty(sum(self._widths), dtype=torch.uint8, device=self._device)
        super().launch(held, in_steps)

    def _start(self, flags: bytearray) -> None:
        """Start the all-to-all; the flags follow the slices of each row."""
        if flags:
            start = len(self._nodes_by_rank[self._rank]) * self._slice_bytes
            presence = torch.frombuffer(flags, dtype=torch.uint8)
            # A blocking copy would wait for the backward pass that a GPU still runs.
            self._rows[:, start : start + len(flags)].copy_(presence, non_blocking=True)
        self._work = self._exchange_rows()

    def _exchange_rows(self) -> Any:
        """Start to send row j to rank j; return the work."""
        return dist.all_to_all_single(
            self._in,
            self._rows.view(-1),
            output_split_sizes=self._widths,
            input_split_sizes=[self._rows.shape[1]] * self._ranks,
            group=self._group,
            async_op=True,
        )

    def _gather_sums(self, mine: torch.Tensor) -> Any:
        """Start to send the sum of this rank's slice to all ranks; return the work."""
        return all_gather_single(
            as_bytes(self.sums), as_bytes(mine), group=self._group, async_op=True
        )

    def combine(self) -> None:
        """Do step 2 and start step 3: add this rank's slice along the tree, start the gather."""
        with Waiting("exchange of gradients"):
            self._work.wait()
        rows = self._in.split(self._widths)
        mine = self._add(rows, self._read_flags(rows))
        self._work = self._gather_sums(mine)  # which refers to its memory
        del self._rows, self._in

    def _read_flags(self, rows: Sequence[torch.Tensor]) -> list[list[int]]:
        """Return the flags of each rank, which follow the slices in its row."""
        counts = [len(nodes) * len(self.bucket.members) for nodes in self._nodes_by_rank]
        starts = [len(nodes) * self._slice_bytes for nodes in self._nodes_by_rank]
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
        return parts(self.bucket, self.sums, self._present)
