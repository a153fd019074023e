"""A process group of torch on a communicator of MPI, without its operations.

It has what the operations share: the memory of tensors as MPI's, exchanges of pieces that lie
anywhere, works, and the checks of arguments.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.comm.backend import ArgumentError
from lockstep.comm.mpi import library
from lockstep.comm.mpi.buffers import Buffers
from lockstep.comm.mpi.reduction import ReductionPlan, plan_reduction, torch_function, type_of_size
from lockstep.comm.mpi.work import MpiWork, progress
from lockstep.comm.python_process_group import PythonProcessGroup

__all__ = ["MpiGroup", "Pieces", "free_types"]

Finish = Callable[[], object]
Pieces = Sequence[torch.Tensor | None]  # per rank: contiguous, or None for nothing


class MpiGroup(PythonProcessGroup):
    """A process group on a communicator of its own.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: The communicator.
        store: The store of the group.
        ranks: The global ranks of the members.
        timeout: The seconds after which an operation fails.
    """

    def __init__(
        self, mpi: Any, comm: Any, store: Any, ranks: Sequence[int], timeout: float
    ) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), store, "mpi4py", timeout)
        self._mpi, self._comm, self._ranks = mpi, comm, list(ranks)
        self._max_tag = comm.Get_attr(mpi.TAG_UB)
        self._failure = ""

    def shutdown(self) -> None:
        """Free the communicator, unless operations on it are unfinished."""
        if self._comm is None or self._process != os.getpid():
            return
        comm, self._comm = self._comm, None
        if not self._failure and not self._mpi.Is_finalized():
            comm.Free()

    def abort(self) -> None:
        """Let later calls fail."""
        self._failure = self._failure or "the process group was aborted"

    # From torch's calls to MPI's.

    def _move(
        self,
        name: str,
        send: Pieces,
        receive: Pieces,
        buffers: Buffers,
        outputs: Sequence[torch.Tensor],
        opts: Any,
    ) -> MpiWork:
        requests: list[Any] = []
        kept: list[Any] = []
        self._exchange(send, receive, requests, kept)

        def finish() -> None:
            free_types(kept)
            buffers.copy_back()

        return self._start(name, requests, finish, outputs, opts, (buffers, kept))

    def _exchange(
        self, send: Pieces, receive: Pieces, requests: list[Any], kept: list[Any]
    ) -> None:
        """Send a piece to each rank and receive one from each, where they lie in memory."""
        own, given = receive[self._rank], send[self._rank]
        if own is not None and given is not None:
            own.view(-1).copy_(given.view(-1))
        if self._size == 1:
            return
        blank = [0] * self._size
        specs = []
        for pieces in (send, receive):
            counts, types = list(blank), [self._mpi.BYTE] * self._size
            for rank, piece in enumerate(pieces):
                if rank == self._rank or piece is None or not piece.numel():
                    continue
                plain = getattr(self._mpi, type_of_size(piece.element_size()))
                # The address is in the type, because the pieces lie anywhere.
                types[rank] = plain.Create_hindexed([piece.numel()], [piece.data_ptr()]).Commit()
                counts[rank] = 1
                kept.append(types[rank])
            specs.append([self._mpi.BOTTOM, counts, blank, types])
        requests.append(self._comm.Ialltoallw(*specs))

    def _bytes(self, tensor: torch.Tensor) -> list[Any]:
        """Return the specification of a contiguous tensor that is moved."""
        count, size = tensor.numel(), tensor.element_size()
        memory = self._mpi.buffer.fromaddress(tensor.data_ptr(), count * size)
        return [memory, count, getattr(self._mpi, type_of_size(size))]

    def _numbers(self, tensor: torch.Tensor, plan: ReductionPlan) -> list[Any]:
        """Return the specification of a contiguous tensor that is reduced."""
        count = tensor.numel()
        memory = self._mpi.buffer.fromaddress(tensor.data_ptr(), count * tensor.element_size())
        return [memory, count * plan.numbers, getattr(self._mpi, plan.mpi_type)]

    def _operation(self, plan: ReductionPlan, tensor: torch.Tensor) -> Any:
        if plan.uses_torch:
            return _torch_operation(self._mpi, plan.operation, tensor.dtype)
        return getattr(self._mpi, plan.operation)

    def _divide(self, plan: ReductionPlan, tensors: Sequence[torch.Tensor]) -> None:
        if plan.is_average:
            for tensor in tensors:
                tensor.div_(self._size)

    def _prepare(
        self,
        name: str,
        requests: Sequence[Any],
        finish: Finish,
        outputs: Sequence[torch.Tensor],
        opts: Any,
        keep: object,
        peers: Sequence[int] = (),
        *,
        needs_all: bool = True,
        with_status: bool = False,
    ) -> MpiWork:
        """Return the work of an operation.

        Args:
            name: The name of the operation.
            requests: MPI's requests.
            finish: Called when they are complete.
            outputs: The tensors that are written.
            opts: The options of the call; None for messages.
            keep: What must live as long as the requests.
            peers: The global ranks that have to take part; all others if empty.
            needs_all: Whether all of them have to, or one of them.
            with_status: Whether the work gets the statuses of the requests.
        """
        self._calls += 1
        given = -1.0 if opts is None else opts.timeout.total_seconds()
        return MpiWork(
            self._mpi,
            f"rank {self._ranks[self._rank]}: {name}",
            requests,
            finish,
            list(outputs),
            given if given > 0 else self._timeout,
            self._fail,
            (keep, self._comm),
            peers or [rank for rank in self._ranks if rank != self._ranks[self._rank]],
            needs_all=needs_all,
            with_status=with_status,
        )

    def _start(self, *given: Any) -> MpiWork:
        """Return the work of an operation; arguments as for `_prepare`."""
        work = self._prepare(*given)
        opts = given[4]
        if opts is None or opts.asyncOp:
            progress.add_unless_over(work)
        return work

    # Mistakes of the caller.

    def _fail(self, sentence: str) -> None:
        self._failure = self._failure or sentence

    def _mistake(self, sentence: str) -> ArgumentError:
        return ArgumentError(f"rank {self._ranks[self._rank]}: {sentence}")

    def _check_usable(self) -> None:
        if self._failure:
            raise RuntimeError(f"the group cannot be used any more, because {self._failure}")
        if self._comm is None:
            raise self._mistake("the process group is destroyed")
        if self._process != os.getpid():
            raise self._mistake(
                f"process {os.getpid()} is a fork of the rank, process {self._process}, and cannot "
                "use its MPI: communicate in the rank itself"
            )

    def _check(self, name: str, tensors: Any, count: int | None = None) -> Sequence[torch.Tensor]:
        """Check the tensors of a call, and return them."""
        self._check_usable()
        if count is not None and len(tensors) != count:
            raise self._mistake(f"{name}: expected {count} tensor(s), not {len(tensors)}")
        if not len(tensors):
            raise self._mistake(f"{name}: the list of tensors is empty")
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise self._mistake(
                    f"{name}: the tensor is on {tensor.device}, and the backend 'mpi4py' is for "
                    "CPU tensors: use NCCL for GPUs"
                )
            if tensor.layout != torch.strided:
                raise self._mistake(f"{name}: the layout {tensor.layout} is not supported")
            if _has_shared_elements(tensor):
                raise self._mistake(f"{name}: elements of the tensor overlap: clone it first")
        checked: Sequence[torch.Tensor] = tensors
        return checked

    def _check_list(self, name: str, tensors: Any, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Check a list with an entry per rank."""
        checked = self._check(name, tensors, count=self._size)
        if any(tensor.dtype != dtype for tensor in checked):
            raise self._mistake(f"{name}: the tensors of the list are not all of {dtype}")
        return checked

    def _check_length(self, name: str, output: torch.Tensor, given: torch.Tensor) -> None:
        if output.numel() != given.numel() or output.dtype != given.dtype:
            raise self._mistake(
                f"{name}: {given.numel()} elements of {given.dtype} do not fit into "
                f"{output.numel()} of {output.dtype}"
            )

    def _check_root(self, name: str, root: int) -> None:
        if not 0 <= root < self._size:
            raise self._mistake(f"{name}: there is no rank {root} in a group of {self._size}")

    def _check_peer(self, name: str, peer: int, tag: int) -> None:
        self._check_usable()
        self._check_root(name, peer)
        if not 0 <= tag <= self._max_tag:
            raise self._mistake(
                f"{name}: the tag is {tag}, but {library.library_name(self._mpi)} has tags "
                f"from 0 to {self._max_tag}"
            )

    def _plan(self, name: str, op: Any, dtype: torch.dtype) -> tuple[ReductionPlan, Any]:
        """Return the plan of a reduction, and the factor of PREMUL_SUM."""
        kind, factor = op.__getstate__()
        try:
            return plan_reduction(kind.name, dtype), factor
        except ValueError as error:
            raise self._mistake(f"{name}: {error}") from None


@functools.cache
def _torch_operation(mpi: Any, operation: str, dtype: torch.dtype) -> Any:
    """Return an operation of MPI that calls torch's function on vectors of `dtype`."""
    function = torch_function(operation)

    def reduce(left: Any, right: Any, _: Any) -> None:
        if len(right):
            into = torch.frombuffer(right, dtype=dtype)
            function(into, torch.frombuffer(left, dtype=dtype), out=into)

    return mpi.Op.Create(reduce, commute=True)


def _has_shared_elements(tensor: torch.Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def free_types(types: list[Any]) -> None:
    """Free the types of an exchange and empty the list."""
    while types:
        types.pop().Free()
