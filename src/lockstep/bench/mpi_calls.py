"""The collectives as mpi4py calls them. Runs in MPI's own environment: numpy and mpi4py only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.bench.collectives import COLLECTIVES, ROOT, partner
from lockstep.bench.measure import CannotError, Order
from lockstep.bench.numpy_calls import NumpyBuffers, Vector

__all__ = ["MpiLibrary"]

NAMES = {"PRODUCT": "PROD"}  # where MPI's word differs
Call = Callable[[], object]


class MpiLibrary(NumpyBuffers):
    """Calls on `comm`, a communicator of mpi4py's module `mpi`."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm

    def call(self, order: Order, send: Vector, receive: Vector) -> Call:
        """Return the call, on buffers described once."""
        mpi, comm = self._mpi, self._comm
        if order.collective == "barrier":
            return partial(comm.Barrier)
        is_root = comm.Get_rank() == ROOT
        give, take = self._described(send, order), self._described(receive, order)
        match order.collective:
            case "all_reduce":
                return partial(comm.Allreduce, mpi.IN_PLACE, take, self._op(order))
            case "reduce" if is_root:
                return partial(comm.Reduce, mpi.IN_PLACE, take, self._op(order), ROOT)
            case "reduce":
                return partial(comm.Reduce, give, None, self._op(order), ROOT)
            case "reduce_scatter" if not order.in_place:
                return partial(comm.Reduce_scatter_block, give, take, self._op(order))
            case "broadcast":
                return partial(comm.Bcast, give, ROOT)
            case "all_gather":
                return partial(comm.Allgather, mpi.IN_PLACE if order.in_place else give, take)
            case "gather":
                return partial(comm.Gather, give, take if is_root else None, ROOT)
            case "scatter":
                return partial(comm.Scatter, give if is_root else None, take, ROOT)
            case "all_to_all":
                return partial(comm.Alltoall, give, take)
            case "send_recv":
                return self._round_trip(give, take)
        raise CannotError(f"MPI has no {order.collective} that works in place like torch's")

    def _described(self, buffer: Vector, order: Order) -> list[Any]:
        """Return a buffer with the elements of a part and MPI's type, found once for all calls."""
        found = self._mpi._typedict.get(buffer.dtype.char)
        if found is None:
            raise CannotError(f"MPI has no {buffer.dtype}")
        return [buffer, order.count, found]

    def _op(self, order: Order) -> Any:
        assert COLLECTIVES[order.collective].reduces
        if order.op == "AVG":
            raise CannotError("MPI has no AVG")
        return getattr(self._mpi, NAMES.get(order.op, order.op))

    def _round_trip(self, give: list[Any], take: list[Any]) -> Call:
        comm = self._comm
        rank, other = comm.Get_rank(), partner(comm.Get_rank(), comm.Get_size())
        if other is None:
            return lambda: None

        def first() -> None:
            comm.Send(give, other)
            comm.Recv(take, other)

        def second() -> None:
            comm.Recv(take, other)
            comm.Send(give, other)

        return first if rank < other else second
