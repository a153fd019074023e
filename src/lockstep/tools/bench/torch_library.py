"""Workloads on tensors: the collectives of `torch.distributed` on the default group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from lockstep.tools.bench.measured_collectives import ROOT, partner
from lockstep.tools.bench.workload import UnsupportedError, Values, Workload

__all__ = ["TorchLibrary"]

# torch 2.13 renamed these functions
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Call = Callable[[], object]


class TorchLibrary:
    """Buffers as tensors, in shared memory if the workload asks for it."""

    def new(self, count: int, workload: Workload) -> torch.Tensor:
        """Return a vector of zeros with its pages touched."""
        if not workload.shared_memory:
            return torch.zeros(count)
        from lockstep.comm.shared_memory import empty_shared

        tensor: torch.Tensor = empty_shared(count)
        return tensor.zero_()

    def convert(self, values: Values) -> torch.Tensor:
        """Return the values as a tensor of float32."""
        return torch.from_numpy(values).to(torch.float32)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `target`, broadcast."""
        target.copy_(source)

    def count_wrong(self, actual: torch.Tensor, expected: torch.Tensor) -> int:
        """Count the elements that differ."""
        return int((actual != expected).sum())

    def call(self, workload: Workload, send: torch.Tensor, receive: torch.Tensor) -> Call:
        """Return the call on the default group."""
        ranks = dist.get_world_size()
        match workload.collective:
            case "all_reduce":
                return partial(dist.all_reduce, send)
            case "reduce":
                return partial(dist.reduce, send, ROOT)
            case "reduce_scatter":
                return partial(reduce_scatter_single, receive, send)
            case "broadcast":
                return partial(dist.broadcast, send, ROOT)
            case "all_gather":
                return partial(all_gather_single, receive, send)
            case "gather":
                return partial(dist.gather, send, pieces(receive, ranks), ROOT)
            case "scatter":
                return partial(dist.scatter, receive, pieces(send, ranks), ROOT)
            case "all_to_all":
                return partial(dist.all_to_all_single, receive, send)
            case "send_recv":
                return round_trip(dist.get_rank(), ranks, send, receive)
            case "barrier":
                return dist.barrier
            case "memcpy":
                return partial(np.copyto, receive.numpy(), send.numpy())
        raise UnsupportedError(f"no call for {workload.collective}")


def pieces(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor] | None:
    """Return one piece of a tensor per rank, or None for an empty tensor."""
    return list(tensor.chunk(ranks)) if len(tensor) else None


def round_trip(rank: int, ranks: int, send: torch.Tensor, receive: torch.Tensor) -> Call:
    """Return a round trip with the partner; an odd last rank has none."""
    other = partner(rank, ranks)
    if other is None:
        return lambda: None

    def first() -> None:
        dist.send(send, other)
        dist.recv(receive, other)

    def second() -> None:
        dist.recv(receive, other)
        dist.send(send, other)

    return first if rank < other else second
