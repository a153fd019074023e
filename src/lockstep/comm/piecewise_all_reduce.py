"""The reproducible all-reduce of a large bucket, piece by piece, with little memory for messages.

    bucket    | piece 0 | piece 1 | piece 2 |

    piece 0   exchange  add       gather
    piece 1             exchange  add       gather
    piece 2                       exchange  add       gather

Each element is added along the same tree, so the pieces change no bit. In addition to the
gradients of this rank and their sums, only messages of pieces that are being sent take memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lockstep.comm.bucket import ALIGNMENT, Bucket, cut_bucket, parts, round_up
from lockstep.comm.portable_all_reduce import GroupTransport, PortableAllReduce
from lockstep.comm.reproducible_all_reduce import Held, ReproducibleAllReduce, Values
from lockstep.comm.slice_plan import SlicePlan
from lockstep.kernel.norm import in_memory_order
from lockstep.kernel.tree import Node

__all__ = ["PIECE_BYTES", "PiecewiseAllReduce"]

PIECE_BYTES = 4 << 20
"""The bytes per piece, chosen by measurement: see "Pieces of buckets" in LOG.md."""


class PiecewiseAllReduce(ReproducibleAllReduce):
    """The implementation for large buckets in memory of the CPU; arguments as of `make_all_reduce`.

    Args:
        piece_bytes: The bytes per piece.
    """

    def __init__(
        self,
        bucket: Bucket,
        nodes_by_rank: Sequence[Sequence[Node]],
        leaves: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.bucket = bucket
        size = bucket.dtype.itemsize
        ranks = len(nodes_by_rank)
        # Whole slices of all ranks, so that the sums of the pieces follow each other.
        line = ranks * ALIGNMENT // size
        length = round_up(piece_bytes // size, line)
        self.sums = torch.empty(round_up(bucket.length, line), dtype=bucket.dtype, device=device)
        self._pieces: list[PortableAllReduce] = []
        self._starts: list[dict[int, int]] = []  # of each member in each piece, by its index
        for start in range(0, bucket.length, length):
            piece = cut_bucket(bucket, slice(start, min(start + length, bucket.length)))
            sums = self.sums[start : start + length]
            made = SlicePlan(piece, nodes_by_rank, leaves, dist.get_rank(group))
            self._pieces.append(PortableAllReduce(made, GroupTransport(group), device, sums))
            self._starts.append({m.index: max(0, start - m.offset) for m in bucket.members})
        self._held: dict[Node, dict[int, torch.Tensor | None]] = {}

    def launch(self, held: Held, in_steps: bool = False) -> None:
        """Start the exchange of the first piece; see `ReproducibleAllReduce.launch`."""
        self._held = {node: self._flatten(values) for node, values in held.items()}
        self._launch(0)

    def _flatten(self, values: Values) -> dict[int, torch.Tensor | None]:
        """Return the values of the members as vectors in memory order."""
        flat: dict[int, torch.Tensor | None] = {}
        for member in self.bucket.members:
            value = values[member.index]
            flat[member.index] = None if value is None else in_memory_order(value)
        return flat

    def _launch(self, number: int) -> None:
        """Start the exchange of a piece."""
        piece = self._pieces[number]
        starts = self._starts[number]
        held: dict[Node, Mapping[int, torch.Tensor | None]] = {}
        for node, vectors in self._held.items():
            held[node] = {
                member.index: None
                if (vector := vectors[member.index]) is None
                else vector[starts[member.index] :][: member.numel]
                for member in piece.bucket.members
            }
        piece.launch(held)

    def combine(self) -> None:
        """Add the pieces one after another, while the next one is exchanged."""
        for number, piece in enumerate(self._pieces):
            if number + 1 < len(self._pieces):
                self._launch(number + 1)
            piece.combine()
            if number:
                self._pieces[number - 1].gather()  # its messages are freed
        self._held = {}

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Finish; see `ReproducibleAllReduce.gather`."""
        present = [value is not None for _, value in self._pieces[-1].gather()]
        return parts(self.bucket, self.sums, present)
