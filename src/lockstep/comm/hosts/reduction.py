"""The messages and buffers of one rank in the sums of gradients across hosts.

`lockstep.comm.hosts.reduction_plan` says which rank combines and sends what. The slices are cut
into chunks, which pass through a pipeline (`lockstep.comm.hosts.reduction_pipeline`), so that the
network never waits for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.bucket import round_up
from lockstep.comm.hosts.map import HostMap

__all__ = ["HostReducer", "chunk_length"]

CHUNK_BYTES = 1 << 20
"""The bytes of a chunk, of all slices together, by measurement: see LOG.md."""

LEAST_MESSAGE_BYTES = 128 << 10
"""A chunk is not smaller than this per slice, unless the slice is."""


class HostReducer:
    """The messages and buffers of one rank.

    Args:
        hosts: The ranks of each host.
        rank: This rank.
        local: The native backend of the ranks on this host, in the order of the map.
        between: The connections to other hosts.

    Attributes:
        rank: This rank.
        host: The number of its host.
    """

    def __init__(self, hosts: HostMap, rank: int, local: Any, between: Any) -> None:
        self.rank, self.host = rank, hosts.host_of(rank)
        self._local, self._between = local, between
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def barrier(self) -> None:
        """Wait until all ranks of this host have come here."""
        self._local.barrier(dist.BarrierOptions()).wait()

    def buffer(self, name: str, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer, which is kept for the next calls."""
        needed = size * dtype.itemsize
        kept = self._buffers.get((name, number))
        if kept is None or kept.numel() < needed:
            kept = self._buffers[name, number] = torch.empty(needed, dtype=torch.uint8)
        return kept[:needed].view(dtype)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to send a vector to a rank of another host."""
        return self._between.send([tensor.view(torch.uint8)], rank, tag)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to receive a vector from a rank of another host."""
        return self._between.recv([tensor.view(torch.uint8)], rank, tag)


def chunk_length(sizes: Sequence[int], itemsize: int) -> int:
    """Return the number of elements of a chunk of one slice, in whole cache lines."""
    line = max(64 // itemsize, 1)
    most = CHUNK_BYTES // len(sizes) // itemsize // line * line
    largest = max(sizes, default=0)
    least = LEAST_MESSAGE_BYTES // itemsize
    quarter = round_up(round_up(largest, 4) // 4, line)
    return max(line, min(most, max(least, quarter)))
