"""Workloads of MPI's own collectives, on the memory of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.tools.bench.measured_collectives import ROOT, partner
from lockstep.tools.bench.torch_library import TorchLibrary
from lockstep.tools.bench.workload import UnsupportedError, Workload

__all__ = ["MpiLibrary", "name_library"]

Vector = npt.NDArray[Any]
Call = Callable[[], object]


def name_library(mpi: Any) -> str:
    """Return name and version of the library, such as "MPICH 5.0.2"."""
    words = str(mpi.Get_library_version()).replace("Version:", " ").replace(",", " ").split()
    return " ".join(words[: 3 if words[:1] in (["Open"], ["Intel(R)"]) else 2])


class MpiLibrary(TorchLibrary):
    """The collectives of mpi4py's module `mpi` on the communicator `comm`."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm

    def call(self, workload: Workload, send: torch.Tensor, receive: torch.Tensor) -> Call:
        """Return the call, with the descriptions of its buffers."""
        mpi, comm, name = self._mpi, self._comm, workload.collective
        if name == "barrier":
            return partial(comm.Barrier)
        if name == "memcpy":
            return partial(np.copyto, receive.numpy(), send.numpy())
        is_root = comm.Get_rank() == ROOT
        sent, received = (self._specify(buffer.numpy(), workload) for buffer in (send, receive))
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
            case "send_recv":
                return self._round_trip(sent, received)
        raise UnsupportedError(f"no call for {name}")

    def _specify(self, buffer: Vector, workload: Workload) -> list[Any]:
        """Return an mpi4py buffer specification: array, elements per part, MPI type."""
        return [buffer, workload.count, self._mpi.FLOAT]

    def _round_trip(self, send_spec: list[Any], receive_spec: list[Any]) -> Call:
        comm = self._comm
        rank, other = comm.Get_rank(), partner(comm.Get_rank(), comm.Get_size())
        if other is None:
            return lambda: None

        def first() -> None:
            comm.Send(send_spec, other)
            comm.Recv(receive_spec, other)

        def second() -> None:
            comm.Recv(receive_spec, other)
            comm.Send(send_spec, other)

        return first if rank < other else second
