"""Reductions across hosts: in shared memory inside a host, in messages between hosts.

`lockstep.comm.hosts.reduction_plan` says which rank combines and sends what. The slices are cut
into chunks, which pass through a pipeline, so that the network never waits for memory:

    chunk i          the ranks of a host publish it; each rank combines the terms of the slices
                     that it handles, and sends them to their owners
    chunk i - 1      each owner receives the terms of its slice from the other hosts, combines them
                     with those of its own host in the order of the tree, and sends the result back
    chunk i - 3      the results have arrived; every rank of the host takes them

When a rank waits for a chunk, the messages of two later steps are queued in the other direction.
The arithmetic is that of the one-host backend (csrc/core/tree_reduce.h): 16-bit floats that are
rounded once, at the root of the tree, travel as float32 where they have been combined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lockstep.comm.bucket import round_up
from lockstep.comm.hosts.compression import Codec
from lockstep.comm.hosts.map import HostMap
from lockstep.comm.hosts.reduction_plan import (
    ReductionPlan,
    Term,
    plan_reduction,
    slice_bounds,
)
from lockstep.comm.reduction_arithmetic import Reduction
from lockstep.comm.tree import Node

__all__ = ["Agree", "Group", "HostReducer", "Values", "chunk_length"]

CHUNK_BYTES = 1 << 20
"""The bytes of a chunk, of all slices together, by measurement: see LOG.md."""

LEAST_MESSAGE_BYTES = 128 << 10
"""A chunk is not smaller than this per slice, unless the slice is."""

DELAY = 3
"""The number of chunks between the publication of a chunk and the use of its results."""

SLOTS = DELAY + 2
"""The number of staging buffers of a rank. A rank writes the buffer of chunk i while other ranks
may still read that of chunk i - 4."""

TERM_TAG, RESULT_TAG = 0x4C530001, 0x4C530002
"""The tags of the messages."""


class Group(Protocol):
    """A group whose ranks are on several hosts, as one of its ranks holds it.

    Attributes:
        map: The ranks of each host.
        rank: This rank.
        local: The native backend of the ranks on this host, in the order of the map.
        between: A process group of all ranks, which carries messages between hosts.
    """

    map: HostMap
    rank: int
    local: Any
    between: Any


class Values(Protocol):
    """The values of the ranks of a host, in memory that they share; chunks count from 0."""

    def load(self, chunk: int) -> None:
        """Put this rank's values of a chunk there."""

    def publish(self) -> None:
        """Wait until all ranks of the host have loaded the chunk, unless they had before."""

    def read(self, rank: int, number: int, slice_: int, chunk: int) -> torch.Tensor:
        """Return the values of node `number` of a rank of this host."""

    def result(self, slice_: int, chunk: int) -> torch.Tensor:
        """Return the memory for the result of a slice that this rank handles."""

    def spread(self, slice_: int, chunk: int) -> None:
        """Write a result of this rank to the other ranks of the host, unless they read it."""

    def store(self, chunk: int) -> None:
        """Take the results of a chunk, of which all ranks of the host have theirs."""

    def end(self) -> None:
        """Finish the call."""

    def parts(
        self, inputs: Sequence[Sequence[tuple[int, int]]], slice_: int, chunk: int
    ) -> list[tuple[slice, list[bool]]]:
        """Return the parts of a chunk of a slice, and which inputs are present in each.

        Args:
            inputs: For each input, the (rank, number of the node) of the values that it combines.
            slice_: The slice.
            chunk: The chunk.

        Returns:
            Presence is a flag per input; an empty list means that all are present.
        """


class StagedValues:
    """The values of ranks with private memory, which pass through the staging buffers of the host.

    Args:
        reducer: The reducer, with the staging buffers.
        sources: For each slice, the vector from which this rank's values are read.
        targets: For each slice, the vector to which its results are written, or None.
    """

    def __init__(
        self,
        reducer: HostReducer,
        plan: ReductionPlan,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor | None],
        chunk: int,
    ) -> None:
        self._reducer, self._sources, self._targets = reducer, sources, targets
        self._chunk, self._dtype = chunk, sources[0].dtype
        host = reducer.host
        self._handlers = [plan.handler(each, host) for each in range(len(plan.owners))]
        self._ranks = plan.map.hosts[host]

    def load(self, chunk: int) -> None:
        """Copy this rank's values of a chunk to its staging buffer."""
        lo = chunk * self._chunk
        for number, source in enumerate(self._sources):
            part = source[lo : lo + self._chunk]
            if part.numel():
                self._staged(self._reducer.rank, number, chunk, part.numel()).copy_(part)

    def publish(self) -> None:
        """Wait until all ranks of the host have come here."""
        self._reducer.barrier()

    def read(self, rank: int, number: int, slice_: int, chunk: int) -> torch.Tensor:
        """Return the values of a rank of this host."""
        return self._staged(rank, slice_, chunk, self._size(slice_, chunk))

    def result(self, slice_: int, chunk: int) -> torch.Tensor:
        """Return the memory for the result of a slice that this rank handles."""
        return self.read(self._reducer.rank, 0, slice_, chunk)

    def spread(self, slice_: int, chunk: int) -> None:
        """Do nothing: the other ranks of the host read the result in `store`."""

    def store(self, chunk: int) -> None:
        """Copy the results of a chunk to this rank's tensors."""
        lo = chunk * self._chunk
        for number, target in enumerate(self._targets):
            if target is None:
                continue
            part = target[lo : lo + self._chunk]
            if part.numel():
                part.copy_(self._staged(self._handlers[number], number, chunk, part.numel()))

    def end(self) -> None:
        """Do nothing: the next call begins with another staging buffer."""

    def parts(
        self, inputs: Sequence[Sequence[tuple[int, int]]], slice_: int, chunk: int
    ) -> list[tuple[slice, list[bool]]]:
        """Return the whole chunk: all values are present."""
        return [(slice(None), [])]

    def _size(self, slice_: int, chunk: int) -> int:
        return max(0, min(self._chunk, self._sources[slice_].numel() - chunk * self._chunk))

    def _staged(self, rank: int, slice_: int, chunk: int, size: int) -> torch.Tensor:
        row = self._reducer.staging(self._ranks.index(rank), chunk)
        item = self._dtype.itemsize
        start = slice_ * self._chunk * item
        return row[start : start + size * item].view(self._dtype)


Agree = Callable[[], object]
"""Compares the calls of the ranks, and raises an error if they differ.

It is called before anything is received, when the first messages are on their way."""


def _agree() -> None:
    """Compare nothing: the caller knows that all ranks make the same call."""


class HostReducer:
    """Reduces tensors over a group whose ranks are on several hosts; keeps its buffers.

    All ranks must make the same calls in the same order, from one thread at a time.

    Args:
        group: The group.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.host = group.map.host_of(group.rank)
        self._ranks = len(group.map.hosts[self.host])
        self._staging: torch.Tensor | None = None
        self._staging_slot = 0  # of the next call
        self._scratch: dict[tuple[str, int], torch.Tensor] = {}
        self._plans: dict[tuple[object, ...], ReductionPlan] = {}

    # ---- calls ----

    def all_reduce(
        self,
        tensor: torch.Tensor,
        number: int,
        factors: Sequence[float] = (),
        agree: Agree = _agree,
    ) -> None:
        """Reduce a contiguous tensor over all ranks, in place.

        Args:
            tensor: The tensor, of the same dtype and number of elements on every rank.
            number: The number of the reduction in `torch.distributed.ReduceOp`.
            factors: The factor of each rank, for PREMUL_SUM.
            agree: A function that raises an error if the ranks make different calls.
        """
        self._reduce_whole(tensor, number, factors, None, agree)

    def reduce(
        self,
        tensor: torch.Tensor,
        number: int,
        root: int,
        factors: Sequence[float] = (),
        agree: Agree = _agree,
    ) -> None:
        """Reduce a contiguous tensor to rank `root`; the tensors of other ranks do not change."""
        self._reduce_whole(tensor, number, factors, root, agree)

    def reduce_scatter(
        self,
        inputs: Sequence[torch.Tensor],
        output: torch.Tensor,
        number: int,
        factors: Sequence[float] = (),
        agree: Agree = _agree,
    ) -> None:
        """Reduce a contiguous tensor per rank; rank r gets the result of tensor r.

        Args:
            inputs: A tensor for each rank, with the number of elements of its output.
            output: This rank's result.
            number: The number of the reduction.
            factors: The factor of each rank, for PREMUL_SUM.
            agree: As for `all_reduce`.
        """
        reduction = Reduction(output.dtype, number, len(inputs), factors)
        plan = self._plan(reduction, None, scatter=True)
        sources = [each.view(-1) for each in inputs]
        targets: list[torch.Tensor | None] = [None] * len(inputs)
        targets[self.rank] = output.view(-1)
        self._run_staged(plan, reduction, sources, targets, agree)

    def _reduce_whole(
        self,
        tensor: torch.Tensor,
        number: int,
        factors: Sequence[float],
        root: int | None,
        agree: Agree,
    ) -> None:
        reduction = Reduction(tensor.dtype, number, self._group.map.size, factors)
        plan = self._plan(reduction, root, scatter=False)
        flat = tensor.view(-1)
        bounds = slice_bounds(flat.numel(), len(plan.owners), flat.dtype.itemsize)
        slices = [flat[lo:hi] for lo, hi in pairwise(bounds)]
        is_target = root is None or root == self.rank
        targets = slices if is_target else [None] * len(slices)
        self._run_staged(plan, reduction, slices, targets, agree)

    def _plan(self, reduction: Reduction, root: int | None, scatter: bool) -> ReductionPlan:
        is_order_free, is_scaled = reduction.is_order_free, bool(reduction.factors)
        wide_factor = reduction.wide.itemsize // reduction.dtype.itemsize
        key = (root, scatter, is_order_free, wide_factor, is_scaled)
        if key not in self._plans:
            ranks = self._group.map.size
            self._plans[key] = plan_reduction(
                self._group.map,
                [[(each, each + 1)] for each in range(ranks)],
                ranks,
                root,
                scatter=scatter,
                is_order_free=is_order_free,
                wide_factor=wide_factor,
                is_scaled=is_scaled,
            )
        return self._plans[key]

    def _run_staged(
        self,
        plan: ReductionPlan,
        reduction: Reduction,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor | None],
        agree: Agree,
    ) -> None:
        sizes = [each.numel() for each in sources]
        chunk = chunk_length(sizes, reduction.dtype.itemsize)
        if self._staging is None:
            self._staging = self._group.local.share(SLOTS * self._ranks * CHUNK_BYTES)
        values = StagedValues(self, plan, sources, targets, chunk)
        chunks = self.run(plan, reduction, values, sizes, chunk, agree=agree)
        self._staging_slot = (self._staging_slot + chunks) % SLOTS

    # ---- memory and messages ----

    def staging(self, position: int, chunk: int) -> torch.Tensor:
        """Return the staging buffer for a chunk, of the rank at a position of this host."""
        assert self._staging is not None
        slot = (self._staging_slot + chunk) % SLOTS
        start = (slot * self._ranks + position) * CHUNK_BYTES
        return self._staging[start : start + CHUNK_BYTES]

    def barrier(self) -> None:
        """Wait until all ranks of this host have come here."""
        self._group.local.barrier(dist.BarrierOptions()).wait()

    def buffer(self, name: str, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer, which is kept for the next calls."""
        needed = size * dtype.itemsize
        found = self._scratch.get((name, number))
        if found is None or found.numel() < needed:
            found = self._scratch[name, number] = torch.empty(needed, dtype=torch.uint8)
        return found[:needed].view(dtype)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to send a vector to a rank of another host."""
        return self._group.between.send([tensor.view(torch.uint8)], rank, tag)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to receive a vector from a rank of another host."""
        return self._group.between.recv([tensor.view(torch.uint8)], rank, tag)

    def run(
        self,
        plan: ReductionPlan,
        reduction: Reduction,
        values: Values,
        sizes: Sequence[int],
        chunk: int,
        codec: Codec | None = None,
        agree: Agree = _agree,
    ) -> int:
        """Pass all chunks of slices of these sizes through the pipeline; return their number."""
        chunks = round_up(max(sizes, default=0), chunk) // chunk
        pipeline = Pipeline(self, plan, reduction, values, sizes, chunk, codec)
        if not chunks:
            agree()
        for i in range(chunks + DELAY if chunks else 0):
            if i < chunks:
                values.load(i)
            if i >= DELAY:
                pipeline.finish(i - DELAY)
            values.publish()
            if i >= DELAY:
                values.store(i - DELAY)
            if i < chunks:
                pipeline.send_terms(i)
                if i == 0:
                    agree()
                pipeline.receive(i)
            if 1 <= i <= chunks:
                pipeline.reduce(i - 1)
        values.end()
        return chunks


def chunk_length(sizes: Sequence[int], itemsize: int) -> int:
    """Return the number of elements of a chunk of one slice, in whole cache lines."""
    line = max(64 // itemsize, 1)
    most = CHUNK_BYTES // len(sizes) // itemsize // line * line
    largest = max(sizes, default=0)
    least = LEAST_MESSAGE_BYTES // itemsize
    quarter = round_up(round_up(largest, 4) // 4, line)
    return max(line, min(most, max(least, quarter)))


class Receipt:
    """Values that are being received.

    Args:
        work: The work that receives the message.
        values: Where the values are, in the end.
        message: The memory of the compressed message.
        codec: The codec that reads it; None if the values themselves are received.
    """

    def __init__(
        self,
        work: Any,
        values: torch.Tensor,
        message: torch.Tensor | None = None,
        codec: Codec | None = None,
    ) -> None:
        self._work, self._values, self._message, self._codec = work, values, message, codec

    def wait(self) -> torch.Tensor:
        """Wait for the message; return the values."""
        self._work.wait()
        if self._codec is not None and self._message is not None:
            self._codec.decode(self._message, self._values)
        return self._values


class Pipeline:
    """The messages of one call."""

    def __init__(
        self,
        reducer: HostReducer,
        plan: ReductionPlan,
        reduction: Reduction,
        values: Values,
        sizes: Sequence[int],
        chunk: int,
        codec: Codec | None,
    ) -> None:
        self._reducer, self._plan, self._reduction = reducer, plan, reduction
        self._codec = codec
        self._values, self._sizes, self._chunk = values, sizes, chunk
        self._handled = plan.handled(reducer.rank)
        self._others = [each for each in range(len(plan.map.hosts)) if each != reducer.host]
        # By chunk: works that send, and (slice, works) that receive terms and results.
        self._sends: dict[int, list[Any]] = {}
        self._terms: dict[int, list[tuple[Receipt, Term]]] = {}
        self._results: dict[int, list[tuple[int, Receipt]]] = {}

    def _size(self, slice_: int, chunk: int) -> int:
        return max(0, min(self._chunk, self._sizes[slice_] - chunk * self._chunk))

    def _owns(self, slice_: int) -> bool:
        return self._plan.owners[slice_] == self._reducer.rank

    def _term_dtype(self, host: int) -> torch.dtype:
        return self._reduction.wide if self._plan.is_wide[host] else self._reduction.dtype

    def send_terms(self, chunk: int) -> None:
        """Send the terms of a chunk to their owners."""
        reducer, plan = self._reducer, self._plan
        sends = self._sends.setdefault(chunk, [])
        for slice_ in self._handled:
            size = self._size(slice_, chunk)
            if not size or self._owns(slice_):
                continue
            for n, term in enumerate(plan.terms[reducer.host]):
                value = self._term(term, f"sent {slice_} {n}", slice_, chunk, size)
                message = self._encode(value, f"term {slice_} {n}", chunk)
                sends.append(reducer.send(message, plan.owners[slice_], TERM_TAG))

    def receive(self, chunk: int) -> None:
        """Start to receive the terms of this rank's slice, and the results of other slices."""
        plan, reducer = self._plan, self._reducer
        receives = self._terms.setdefault(chunk, [])
        results = self._results.setdefault(chunk, [])
        for slice_ in self._handled:
            size = self._size(slice_, chunk)
            if not size:
                continue
            if self._owns(slice_):
                for host in self._others:
                    dtype = self._term_dtype(host)
                    for n, term in enumerate(plan.terms[host]):
                        name = f"received {host} {n}"
                        buffer = reducer.buffer(name, chunk % SLOTS, size, dtype)
                        handler = plan.handler(slice_, host)
                        receives.append(
                            (self._receive(buffer, handler, TERM_TAG, name, chunk), term)
                        )
            elif plan.returns:
                target = self._values.result(slice_, chunk)
                name, owner = f"result {slice_}", plan.owners[slice_]
                results.append((slice_, self._receive(target, owner, RESULT_TAG, name, chunk)))

    def _receive(self, target: torch.Tensor, rank: int, tag: int, name: str, chunk: int) -> Receipt:
        """Start to receive values, compressed or not."""
        if self._codec is None:
            return Receipt(self._reducer.receive(target, rank, tag), target)
        size = self._codec.bound(target.numel())
        message = self._reducer.buffer(f"coded {name}", chunk % SLOTS, size, torch.uint8)
        work = self._reducer.receive(message, rank, tag)
        return Receipt(work, target, message, self._codec)

    def _encode(self, values: torch.Tensor, name: str, chunk: int) -> torch.Tensor:
        """Return the message with these values, compressed or not."""
        if self._codec is None:
            return values
        size = self._codec.bound(values.numel())
        buffer = self._reducer.buffer(f"coded {name}", chunk % SLOTS, size, torch.uint8)
        return self._codec.encode(values, buffer)

    def _inputs(self, term: Term, slice_: int, chunk: int) -> list[torch.Tensor]:
        return [self._values.read(rank, n, slice_, chunk) for rank, n in term.inputs]

    def _term(self, term: Term, name: str, slice_: int, chunk: int, size: int) -> torch.Tensor:
        """Return the value of a term of this host."""
        reduction = self._reduction
        inputs = self._inputs(term, slice_, chunk)
        if len(inputs) == 1 and not reduction.factors:
            return inputs[0]  # in shared memory, which does not change before the result comes
        dtype = self._term_dtype(self._reducer.host)
        buffer = self._reducer.buffer(name, chunk % SLOTS, size, dtype)
        keys = [[each] for each in term.inputs]
        for part, present in self._values.parts(keys, slice_, chunk):
            reduction.combine(
                [each[part] for each in inputs], term.nodes, term.leaves, buffer[part],
                reduction.factors_of(term), present,
            )  # fmt: skip
        return buffer

    def _rounded_term(
        self, codec: Codec, term: Term, name: str, slice_: int, chunk: int
    ) -> torch.Tensor:
        """Return the value of a term of this host, as the other hosts would receive it."""
        size = self._size(slice_, chunk)
        value = self._term(term, name, slice_, chunk, size)
        message = self._encode(value, name, chunk)
        buffer = self._reducer.buffer(f"rounded {name}", chunk % SLOTS, size, value.dtype)
        codec.decode(message, buffer)
        return buffer

    def reduce(self, chunk: int) -> None:
        """Reduce a chunk of this rank's slice, and send the result to the other hosts."""
        reducer, plan, reduction = self._reducer, self._plan, self._reduction
        rounding = None if self._codec is None or self._codec.is_lossless else self._codec
        for slice_ in self._handled:
            if not (self._owns(slice_) and self._size(slice_, chunk)):
                continue
            inputs: list[torch.Tensor] = []
            nodes: list[Node] = []
            factors: list[float] = []
            keys: list[Sequence[tuple[int, int]]] = []
            for number, term in enumerate(plan.terms[reducer.host]):
                if rounding is not None:
                    # Rounded as those of the other hosts are, so that the owner does not matter.
                    name = f"own {number}"
                    keys.append(term.inputs)
                    inputs.append(self._rounded_term(rounding, term, name, slice_, chunk))
                    nodes.append(term.node)
                    continue
                keys += [[each] for each in term.inputs]
                inputs += self._inputs(term, slice_, chunk)
                nodes += [(term.node[0] + a, term.node[0] + b) for a, b in term.nodes]
                factors += reduction.factors_of(term)
            for receipt, term in self._terms.pop(chunk):
                keys.append(term.inputs)
                inputs.append(receipt.wait())
                nodes.append(term.node)
                if reduction.factors:
                    factors.append(1)  # its host has multiplied its values
            leaves = plan.leaves
            if reduction.is_order_free:
                nodes, leaves = [(n, n + 1) for n in range(len(inputs))], len(inputs)
            result = self._values.result(slice_, chunk)
            for part, present in self._values.parts(keys, slice_, chunk):
                reduction.combine(
                    [each[part] for each in inputs], nodes, leaves, result[part],
                    factors, present, reduction.divisor,
                )  # fmt: skip
            if plan.returns:
                message = self._encode(result, "own result", chunk)
                if rounding is not None:
                    rounding.decode(message, result)  # as the other hosts will have it
                for host in self._others:
                    handler = plan.handler(slice_, host)
                    work = reducer.send(message, handler, RESULT_TAG)
                    self._sends[chunk].append(work)
            self._values.spread(slice_, chunk)

    def finish(self, chunk: int) -> None:
        """Wait for the messages of a chunk."""
        for slice_, receipt in self._results.pop(chunk):
            receipt.wait()
            self._values.spread(slice_, chunk)
        for work in self._sends.pop(chunk):
            work.wait()
