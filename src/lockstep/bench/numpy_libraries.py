"""Workloads on numpy arrays: the collectives of MPI.

The ranks of MPI have their own environment with numpy and mpi4py only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.bench.collectives import COLLECTIVES, ROOT, partner
from lockstep.bench.workload import UnsupportedError, Values, Workload

__all__ = ["MpiLibrary", "NumpyBuffers"]

Vector = npt.NDArray[Any]
Call = Callable[[], object]
NAMES = {"PRODUCT": "PROD"}  # operations that have another name in MPI


class NumpyBuffers:
    """Buffers as numpy arrays."""

    def new(self, count: int, workload: Workload) -> Vector:
        """Return a vector of zeros with its pages touched."""
        made = np.empty(count, dtype_of(workload))
        made[:] = 0
        return made

    def convert(self, values: Values, workload: Workload) -> Vector:
        """Return numbers in the workload's dtype."""
        return values.astype(dtype_of(workload))

    def copy(self, target: Vector, source: Vector) -> None:
        """Copy `source` into `target`, broadcast."""
        np.copyto(target, source)

    def count_wrong(self, actual: Vector, expected: Vector, is_mean: bool) -> int:
        """Count the elements that differ."""
        if is_mean and actual.dtype.kind == "f":
            limit = 2 * np.finfo(actual.dtype).eps * np.abs(expected)
            return int(np.count_nonzero(np.abs(actual - expected) > limit))
        return int(np.count_nonzero(actual != expected))


class MpiLibrary(NumpyBuffers):
    """The collectives of mpi4py's module `mpi` on the communicator `comm`."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm

    def call(self, workload: Workload, send: Vector, receive: Vector) -> Call:
        """Return the call, with the descriptions of its buffers."""
        mpi, comm = self._mpi, self._comm
        if workload.collective == "barrier":
            return partial(comm.Barrier)
        if workload.collective == "memcpy":
            return partial(np.copyto, receive, send)
        is_root = comm.Get_rank() == ROOT
        send_spec, receive_spec = self._specify(send, workload), self._specify(receive, workload)
        match workload.collective:
            case "all_reduce":
                return partial(comm.Allreduce, mpi.IN_PLACE, receive_spec, self._op(workload))
            case "reduce" if is_root:
                return partial(comm.Reduce, mpi.IN_PLACE, receive_spec, self._op(workload), ROOT)
            case "reduce":
                return partial(comm.Reduce, send_spec, None, self._op(workload), ROOT)
            case "reduce_scatter" if not workload.in_place:
                return partial(
                    comm.Reduce_scatter_block, send_spec, receive_spec, self._op(workload)
                )
            case "broadcast":
                return partial(comm.Bcast, send_spec, ROOT)
            case "all_gather":
                return partial(
                    comm.Allgather, mpi.IN_PLACE if workload.in_place else send_spec, receive_spec
                )
            case "gather":
                return partial(comm.Gather, send_spec, receive_spec if is_root else None, ROOT)
            case "scatter":
                return partial(comm.Scatter, send_spec if is_root else None, receive_spec, ROOT)
            case "all_to_all":
                return partial(comm.Alltoall, send_spec, receive_spec)
            case "send_recv":
                return self._round_trip(send_spec, receive_spec)
        raise UnsupportedError(
            f"MPI has no in-place {workload.collective} with the semantics of torch"
        )

    def _specify(self, buffer: Vector, workload: Workload) -> list[Any]:
        """Return an mpi4py buffer specification: array, elements per part, MPI type."""
        found = self._mpi._typedict.get(buffer.dtype.char)
        if found is None:
            raise UnsupportedError(f"MPI has no {buffer.dtype}")
        return [buffer, workload.count, found]

    def _op(self, workload: Workload) -> Any:
        assert COLLECTIVES[workload.collective].is_reduction
        if workload.op == "AVG":
            raise UnsupportedError("MPI has no AVG")
        return getattr(self._mpi, NAMES.get(workload.op, workload.op))

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


def dtype_of(workload: Workload) -> np.dtype[Any]:
    """Return the numpy dtype of the workload, or raise UnsupportedError."""
    try:
        return np.dtype(workload.dtype)
    except TypeError:
        raise UnsupportedError(f"numpy has no {workload.dtype}") from None
