"""The measured calls: those of torch.distributed on a group, and those of MPI.

Both work on the memory of the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep.tools.bench.measured_collectives import ROOT, partner

__all__ = ["TimedCall", "make_mpi_call", "make_torch_call"]

TimedCall = Callable[[], object]

# torch 2.13 renamed these functions
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def make_torch_call(
    group: dist.ProcessGroup | None, name: str, send: torch.Tensor, receive: torch.Tensor
) -> TimedCall:
    """Return a call of torch's collective `name` from `send` into `receive`."""
    ranks = dist.get_world_size(group)
    match name:
        case "all_reduce":
            return partial(dist.all_reduce, send, group=group)
        case "reduce":
            return partial(dist.reduce, send, ROOT, group=group)
        case "reduce_scatter":
            return partial(reduce_scatter_single, receive, send, group=group)
        case "broadcast":
            return partial(dist.broadcast, send, ROOT, group=group)
        case "all_gather":
            return partial(all_gather_single, receive, send, group=group)
        case "gather":
            return partial(dist.gather, send, _split(receive, ranks), ROOT, group=group)
        case "scatter":
            return partial(dist.scatter, receive, _split(send, ranks), ROOT, group=group)
        case "all_to_all":
            return partial(dist.all_to_all_single, receive, send, group=group)
        case "barrier":
            return partial(dist.barrier, group=group)
    rank = dist.get_rank(group)
    if (other := partner(rank, ranks)) is None:
        return _do_nothing
    sending = partial(dist.send, send, other, group=group)
    receiving = partial(dist.recv, receive, other, group=group)
    return partial(_call_both, *((sending, receiving) if rank < other else (receiving, sending)))


def make_mpi_call(mpi: Any, name: str, send: torch.Tensor, receive: torch.Tensor) -> TimedCall:
    """Return a call of MPI's collective `name`; `mpi` is the module of mpi4py."""
    comm = mpi.COMM_WORLD
    rank = comm.Get_rank()
    ranks = comm.Get_size()
    is_root = rank == ROOT
    sent, received = ([buffer.numpy(), mpi.FLOAT] for buffer in (send, receive))
    match name:
        case "all_reduce":
            return partial(comm.Allreduce, mpi.IN_PLACE, received, mpi.SUM)
        case "reduce" if is_root:
            return partial(comm.Reduce, mpi.IN_PLACE, received, mpi.SUM, ROOT)
        case "reduce":
            return partial(comm.Reduce, sent, None, mpi.SUM, ROOT)
        case "reduce_scatter":
            return partial(comm.Reduce_scatter_block, sent, received, mpi.SUM)
        case "broadcast":
            return partial(comm.Bcast, sent, ROOT)
        case "all_gather":
            return partial(comm.Allgather, sent, received)
        case "gather":
            return partial(comm.Gather, sent, received if is_root else None, ROOT)
        case "scatter":
            return partial(comm.Scatter, sent if is_root else None, received, ROOT)
        case "all_to_all":
            return partial(comm.Alltoall, sent, received)
        case "barrier":
            return partial(comm.Barrier)
    if (other := partner(rank, ranks)) is None:
        return _do_nothing
    sending = partial(comm.Send, sent, other)
    receiving = partial(comm.Recv, received, other)
    return partial(_call_both, *((sending, receiving) if rank < other else (receiving, sending)))


def _split(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor] | None:
    """Return one piece of a tensor per rank, or None for an empty tensor."""
    return list(tensor.chunk(ranks)) if len(tensor) else None


def _do_nothing() -> None:
    """Take no part in a round trip: an odd last rank has no partner."""


def _call_both(first: TimedCall, second: TimedCall) -> None:
    first()
    second()
