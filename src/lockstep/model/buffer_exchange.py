"""The exchange with which the ranks of a group merge the buffers that they all have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lockstep.comm.bucket import plan
from lockstep.comm.collectives import broadcast_tensors
from lockstep.comm.make_all_reduce import make_all_reduce
from lockstep.comm.reproducible_all_reduce import reproducible_all_reduce
from lockstep.kernel.tree import Node, TensorList

__all__ = ["GroupExchange"]

BUCKET_BYTES = 4 << 20


class GroupExchange:
    """The exchange of a process group; see `lockstep.kernel.buffers.BufferExchange`.

    Attributes:
        rank: This process's rank in the group.

    Args:
        group: The group of the ranks that hold the same buffers; None for all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = dist.get_rank(group)
        self._group = group

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Overwrite tensors on every rank with those of rank `source`, bit for bit."""
        broadcast_tensors(tensors, self._group, source)

    def add(
        self,
        sums: Mapping[Node, TensorList],
        like: Sequence[torch.Tensor],
        nodes_by_rank: Sequence[Sequence[Node]],
        leaves: int,
    ) -> TensorList:
        """Return the sums along the tree of the nodes of all ranks.

        The arguments are those of `BufferExchange.add`.
        """
        dtypes = [tensor.dtype for tensor in like]
        buckets = plan([tensor.numel() for tensor in like], dtypes, BUCKET_BYTES)
        device = like[0].device  # of all: the trainer has moved its modules there
        reductions = [
            make_all_reduce(bucket, nodes_by_rank, leaves, device, self._group)
            for bucket in buckets
        ]
        by_index = dict(reproducible_all_reduce(reductions, sums))
        return [by_index[index] for index in range(len(like))]
