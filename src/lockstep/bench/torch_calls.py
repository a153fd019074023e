"""The collectives as `torch.distributed` calls them, on the backend that the world has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep.bench.collectives import ROOT, partner
from lockstep.bench.measure import CannotError, Order
from lockstep.bench.pattern import Numbers

__all__ = ["TorchLibrary"]

# torch 2.13 renamed them
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Call = Callable[[], object]


class TorchLibrary:
    """Buffers are tensors; where the order asks for it they lie in the shared segment."""

    def new(self, count: int, order: Order) -> torch.Tensor:
        """Return a vector of zeros, its pages touched."""
        dtype = dtype_of(order)
        if not order.segment:
            return torch.zeros(count, dtype=dtype)
        import lockstep

        if not hasattr(lockstep, "empty"):
            raise CannotError("this build has no lockstep.empty")
        tensor: torch.Tensor = lockstep.empty(count, dtype=dtype)
        return tensor.zero_()

    def block(self, numbers: Numbers, order: Order) -> torch.Tensor:
        """Return numbers as a tensor of the order's dtype."""
        return torch.from_numpy(numbers).to(dtype_of(order))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, with broadcasting."""
        target.copy_(source)

    def wrong(self, got: torch.Tensor, expected: torch.Tensor, is_mean: bool) -> int:
        """Count elements that differ."""
        if is_mean and got.dtype.is_floating_point:
            limit = 2 * torch.finfo(got.dtype).eps * expected.abs()
            return int(((got - expected).abs() > limit).sum())
        return int((got != expected).sum())

    def call(self, order: Order, send: torch.Tensor, receive: torch.Tensor) -> Call:
        """Return the call; the world is the default group's."""
        op = getattr(dist.ReduceOp, order.op)
        ranks = dist.get_world_size()
        match order.collective:
            case "all_reduce":
                return partial(dist.all_reduce, send, op)
            case "reduce":
                return partial(dist.reduce, send, ROOT, op)
            case "reduce_scatter":
                return partial(reduce_scatter_single, receive, send, op)
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
        raise CannotError(f"no call for {order.collective}")


def dtype_of(order: Order) -> torch.dtype:
    """Return the dtype of that name."""
    found: Any = getattr(torch, order.dtype)
    assert isinstance(found, torch.dtype)
    return found


def pieces(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor] | None:
    """Return a tensor's part for each rank; None where this rank holds nothing."""
    return list(tensor.chunk(ranks)) if len(tensor) else None


def round_trip(rank: int, ranks: int, send: torch.Tensor, receive: torch.Tensor) -> Call:
    """Return a message to the partner and one back; an odd last rank does nothing."""
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
