"""The operations of the backend "mpi4py": calls of torch as calls of mpi4py.

They are written in Python, so that they need no compiler: torch calls the methods below. Every
operation is one of MPI's nonblocking ones, and a rank waits for it by testing it, so that each
wait has a deadline. The MPI call depends only on what all ranks know, never on how a tensor lies in
the memory of one of them, because all ranks have to make the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d

from lockstep.comm.mpi.buffers import Buffers
from lockstep.comm.mpi.group import MpiGroup, Pieces, free_types
from lockstep.comm.mpi.work import MpiWork, progress

__all__ = ["MpiProcessGroup"]

c10d: Any = torch.distributed.distributed_c10d


class MpiProcessGroup(MpiGroup):
    """A process group whose operations are MPI's."""

    # Collective calls that reduce.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> MpiWork:
        """Reduce a tensor over all ranks."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        self._check("all_reduce", tensors, count=1)
        return self._all_reduce(tensors, _options(c10d.AllreduceOptions, opts, timeout))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> MpiWork:
        """Reduce each tensor over all ranks."""
        self._check("all_reduce", tensors)
        return self._all_reduce(tensors, _options(c10d.AllreduceCoalescedOptions, opts))

    def _all_reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> MpiWork:
        planned = [self._plan("all_reduce", opts.reduceOp, tensor.dtype) for tensor in tensors]
        buffers = Buffers([], tensors, in_place=True)
        requests = []
        for target, (plan, factor) in zip(buffers.targets, planned, strict=True):
            if plan.is_scaled:
                target.mul_(factor)
            if self._size > 1:
                numbers, operation = self._numbers(target, plan), self._operation(plan, target)
                requests.append(self._comm.Iallreduce(self._mpi.IN_PLACE, numbers, operation))

        def finish() -> None:
            for target, (plan, _) in zip(buffers.targets, planned, strict=True):
                self._divide(plan, [target])
            buffers.copy_back()

        return self._start("all_reduce", requests, finish, tensors, opts, buffers)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> MpiWork:
        """Reduce a tensor into the one of the root."""
        opts = _options(c10d.ReduceOptions, opts)
        (tensor,) = self._check("reduce", tensors, count=1)
        self._check_root("reduce", opts.rootRank)
        plan, factor = self._plan("reduce", opts.reduceOp, tensor.dtype)
        is_root = self._rank == opts.rootRank
        buffers = Buffers([] if is_root else [tensor], [tensor] if is_root else [], in_place=True)
        (own,) = buffers.targets if is_root else buffers.sources
        if plan.is_scaled:
            own = own.mul_(factor) if is_root else own * factor
        requests = []
        if self._size > 1:
            numbers, operation = self._numbers(own, plan), self._operation(plan, own)
            given = (self._mpi.IN_PLACE, numbers) if is_root else (numbers, None)
            requests.append(self._comm.Ireduce(*given, operation, opts.rootRank))

        def finish() -> None:
            self._divide(plan, buffers.targets)
            buffers.copy_back()

        return self._start("reduce", requests, finish, tensors, opts, (buffers, own))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> MpiWork:
        """Reduce lists of tensors; each rank receives the reduction of its own entry."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(c10d.ReduceScatterOptions, opts)
        (output,) = self._check("reduce_scatter", outputs, count=1)
        parts = self._check_list("reduce_scatter", inputs[0] if inputs else [], output.dtype)
        if parts[self._rank].numel() != output.numel():
            raise self._mistake(
                f"reduce_scatter: the output has {output.numel()} elements, and entry {self._rank} "
                f"of the inputs {parts[self._rank].numel()}"
            )
        whole = torch.cat([part.reshape(-1) for part in parts])
        counts = [part.numel() for part in parts]
        return self._reduce_scatter([output], [whole], [counts], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> MpiWork:
        """Reduce tensors; each rank receives an equal part of each."""
        opts = _options(c10d.ReduceScatterOptions, opts)
        self._check("reduce_scatter", [*outputs, *inputs])
        for output, given in zip(outputs, inputs, strict=True):
            if given.numel() != output.numel() * self._size or given.dtype != output.dtype:
                raise self._mistake(
                    f"reduce_scatter: {given.numel()} elements of {given.dtype} are not "
                    f"{self._size} times {output.numel()} of {output.dtype}"
                )
        counts = [[output.numel()] * self._size for output in outputs]
        return self._reduce_scatter(outputs, inputs, counts, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None, *_: Any) -> MpiWork:
        """Reduce a tensor; each rank receives an equal part."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        counts: Sequence[Sequence[int]],
        opts: Any,
    ) -> MpiWork:
        planned = [self._plan("reduce_scatter", opts.reduceOp, output.dtype) for output in outputs]
        buffers = Buffers(inputs, outputs)
        requests, kept = [], []
        rows = zip(planned, buffers.sources, buffers.targets, counts, strict=True)
        for (plan, factor), source, target, numels in rows:
            given = source * factor if plan.is_scaled else source
            kept.append(given)
            if self._size == 1:
                target.view(-1).copy_(given.view(-1))
                continue
            requests.append(
                self._comm.Ireduce_scatter(
                    self._numbers(given, plan),
                    self._numbers(target, plan),
                    [count * plan.numbers for count in numels],
                    self._operation(plan, target),
                )
            )

        def finish() -> None:
            for (plan, _), target in zip(planned, buffers.targets, strict=True):
                self._divide(plan, [target])
            buffers.copy_back()

        return self._start("reduce_scatter", requests, finish, outputs, opts, (buffers, kept))

    # Collective calls that move.

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> MpiWork:
        """Send a tensor of the root to all ranks."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = _options(c10d.BroadcastOptions, opts, timeout)
        self._check("broadcast", tensors, count=1)
        self._check_root("broadcast", opts.rootRank)
        if opts.rootTensor:
            raise self._mistake(f"broadcast: there is no tensor {opts.rootTensor} in the list")
        buffers = Buffers([], tensors, in_place=True)
        requests = []
        if self._size > 1:
            requests.append(self._comm.Ibcast(self._bytes(buffers.targets[0]), opts.rootRank))
        return self._start("broadcast", requests, buffers.copy_back, tensors, opts, buffers)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        """Gather tensors of one size into one tensor each."""
        opts = _options(c10d.AllgatherOptions, opts)
        self._check("all_gather", [*outputs, *inputs])
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() != given.numel() * self._size or given.dtype != output.dtype:
                raise self._mistake(
                    f"all_gather: {output.numel()} elements of {output.dtype} are not "
                    f"{self._size} times {given.numel()} of {given.dtype}"
                )
        buffers = Buffers(inputs, outputs)
        requests = []
        for source, target in zip(buffers.sources, buffers.targets, strict=True):
            if self._size == 1:
                target.view(-1).copy_(source.view(-1))
            else:
                received = self._bytes(target)
                received[1] = source.numel()  # per rank
                requests.append(self._comm.Iallgather(self._bytes(source), received))
        return self._start("all_gather", requests, buffers.copy_back, outputs, opts, buffers)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Any, given: Any, opts: Any = None, *_: Any) -> MpiWork:
        """Gather tensors of one size into one tensor."""
        return self.all_gather_single_coalesced([output], [given], opts)

    _allgather_base = all_gather_single

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> MpiWork:
        """Gather a tensor of each rank into a list."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        (given,) = self._check("all_gather", inputs, count=1)
        return self._gather_all(outputs, [given], _options(c10d.AllgatherOptions, opts))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> MpiWork:
        """Gather several tensors per rank; entry [r][i] of the outputs is tensor i of rank r."""
        self._check("all_gather", inputs)
        if len(outputs) != self._size:
            raise self._mistake(f"all_gather: {len(outputs)} lists for {self._size} ranks")
        for row in outputs:
            self._check("all_gather", row, count=len(inputs))
        columns = list(zip(*outputs, strict=True))
        return self._gather_all(columns, inputs, _options(c10d.AllgatherOptions, opts))

    def _gather_all(
        self, columns: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any
    ) -> MpiWork:
        """Send each input to all ranks, and receive that of each rank in its column."""
        if len(columns) != len(inputs):
            raise self._mistake(f"all_gather: {len(columns)} lists for {len(inputs)} tensors")
        for column, given in zip(columns, inputs, strict=True):
            self._check_list("all_gather", column, given.dtype)
            self._check_length("all_gather", column[self._rank], given)
        # In the order of the list, in which the last of overlapping outputs wins.
        outputs = [output for row in zip(*columns, strict=True) for output in row]
        buffers = Buffers(inputs, outputs)
        requests: list[Any] = []
        kept: list[Any] = []
        for number, source in enumerate(buffers.sources):
            receive = buffers.targets[number :: len(inputs)]
            self._exchange([source] * self._size, receive, requests, kept)

        def finish() -> None:
            free_types(kept)
            buffers.copy_back()

        return self._start("all_gather", requests, finish, outputs, opts, (buffers, kept))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> MpiWork:
        """Send a tensor to the root, which receives those of all ranks into a list."""
        opts = _options(c10d.GatherOptions, opts)
        (given,) = self._check("gather", inputs, count=1)
        self._check_root("gather", opts.rootRank)
        into: Sequence[torch.Tensor] = []
        if self._rank == opts.rootRank:
            into = self._check_list("gather", outputs[0] if outputs else [], given.dtype)
            self._check_length("gather", into[self._rank], given)
        send: list[torch.Tensor | None] = [None] * self._size
        buffers = Buffers([given], into)
        (send[opts.rootRank],) = buffers.sources
        receive: Pieces = buffers.targets or [None] * self._size
        return self._move("gather", send, receive, buffers, [*into], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> MpiWork:
        """Receive an entry of the root's list."""
        opts = _options(c10d.ScatterOptions, opts)
        (output,) = self._check("scatter", outputs, count=1)
        self._check_root("scatter", opts.rootRank)
        given: Sequence[torch.Tensor] = []
        if self._rank == opts.rootRank:
            given = self._check_list("scatter", inputs[0] if inputs else [], output.dtype)
            self._check_length("scatter", output, given[self._rank])
        receive: list[torch.Tensor | None] = [None] * self._size
        buffers = Buffers(given, [output])
        (receive[opts.rootRank],) = buffers.targets
        send: Pieces = buffers.sources or [None] * self._size
        return self._move("scatter", send, receive, buffers, outputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> MpiWork:
        """Send an entry of the list to each rank, and receive one from each."""
        opts = _options(c10d.AllToAllOptions, opts)
        self._check("all_to_all", [*outputs, *inputs])
        for tensors in (outputs, inputs):
            self._check_list("all_to_all", tensors, outputs[0].dtype)
        self._check_length("all_to_all", outputs[self._rank], inputs[self._rank])
        buffers = Buffers(inputs, outputs)
        return self._move("all_to_all", buffers.sources, buffers.targets, buffers, outputs, opts)

    def all_to_all_single(
        self, output: Any, given: Any, received: Any, sent: Any, opts: Any = None, *_: Any
    ) -> MpiWork:
        """Send a part of the tensor to each rank, and receive one from each, along dimension 0."""
        opts = _options(c10d.AllToAllOptions, opts)
        self._check("all_to_all", [output, given])
        if output.dtype != given.dtype:
            raise self._mistake(f"all_to_all: from {given.dtype} into {output.dtype}")
        received = self._split("output", output, received)
        sent = self._split("input", given, sent)
        if received[self._rank] != sent[self._rank]:
            raise self._mistake(
                f"all_to_all: this rank sends itself {sent[self._rank]} elements and receives "
                f"{received[self._rank]}"
            )
        buffers = Buffers([given], [output])
        (source,), (target,) = buffers.sources, buffers.targets
        requests = []
        if self._size == 1:
            target.view(-1).copy_(source.view(-1))
        else:
            send, receive = self._bytes(source), self._bytes(target)
            requests.append(
                self._comm.Ialltoallv(
                    [send[0], (sent, _offsets(sent)), send[2]],
                    [receive[0], (received, _offsets(received)), receive[2]],
                )
            )
        return self._start("all_to_all", requests, buffers.copy_back, [output], opts, buffers)

    alltoall_base = all_to_all_single

    def _split(self, what: str, tensor: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        """Return the elements per rank."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % self._size:
                raise self._mistake(
                    f"all_to_all: the {rows} rows of the {what} do not divide by {self._size} ranks"
                )
            sizes = [rows // self._size] * self._size
        if len(sizes) != self._size or sum(sizes) != rows or min(sizes) < 0:
            raise self._mistake(
                f"all_to_all: the sizes {list(sizes)} of the {what} are not those of {rows} rows "
                f"for {self._size} ranks"
            )
        width = tensor.numel() // rows if rows else 0
        return [size * width for size in sizes]

    def barrier(self, opts: Any = None, timeout: Any = None) -> MpiWork:
        """Wait until all ranks have called it."""
        opts = _options(c10d.BarrierOptions, opts, timeout)
        self._check_usable()
        requests = [self._comm.Ibarrier()] if self._size > 1 else []
        return self._start("barrier", requests, lambda: None, [], opts, None)

    # Messages.

    def send(self, tensors: Any, destination: int, tag: int = 0) -> MpiWork:
        """Send a tensor to a rank."""
        (tensor,) = self._check("send", tensors, count=1)
        self._check_peer("send", destination, tag)
        (source,) = Buffers(tensors, []).sources
        request = self._comm.Isend(self._bytes(source), destination, tag)
        peer = self._ranks[destination]
        name = f"send to rank {peer}"
        return self._start(name, [request], lambda: None, [tensor], None, source, [peer])

    def recv(self, tensors: Any, source: int, tag: int = 0) -> MpiWork:
        """Receive a tensor from a rank."""
        self._check_peer("recv", source, tag)
        peer = self._ranks[source]
        return self._receive(f"recv from rank {peer}", tensors, source, tag, [peer])

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MpiWork:
        """Receive a tensor from whichever rank sends first; `source_rank()` tells which."""
        self._check_peer("recv", self._rank, tag)
        return self._receive("recv from any rank", tensors, self._mpi.ANY_SOURCE, tag)

    def _receive(
        self, name: str, tensors: Any, source: int, tag: int, peers: Sequence[int] = ()
    ) -> MpiWork:
        (tensor,) = self._check("recv", tensors, count=1)
        buffers = Buffers([], [tensor])
        (target,) = buffers.targets
        spec = self._bytes(target)
        request = self._comm.Irecv(spec, source, tag)

        def finish() -> None:
            (status,) = work.statuses
            work.source = status.Get_source()
            received = status.Get_count(spec[2])
            if received != tensor.numel():
                raise RuntimeError(
                    f"the message from rank {self._ranks[work.source]} has {received} elements of "
                    f"{tensor.element_size()} bytes, and the tensor {tensor.numel()}"
                )
            buffers.copy_back()

        work = self._prepare(
            name,
            [request],
            finish,
            [tensor],
            None,
            buffers,
            peers,
            needs_all=bool(peers),
            with_status=True,
        )
        progress.add_unless_over(work)
        return work


def _options(kind: Callable[[], Any], opts: Any, timeout: Any = None) -> Any:
    """Return the options of a call, of which a program may give only the operation."""
    if opts is not None and hasattr(opts, "asyncOp"):
        return opts
    made = kind()
    if opts is not None:
        made.reduceOp = opts
    if timeout is not None:
        made.timeout = timeout
    return made


def _offsets(counts: Sequence[int]) -> list[int]:
    offsets = [0]
    for count in counts[:-1]:
        offsets.append(offsets[-1] + count)
    return offsets
