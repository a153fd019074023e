"""Reductions across hosts: in shared memory inside a host, in messages between hosts.

`lockstep.comm.hosts.reduction_plan` says which rank combines and sends what. The slices are cut
into chunks, which pass through a pipeline (`lockstep.comm.hosts.reduction_pipeline`), so that the
network never waits for memory.

The arithmetic is that of the one-host backend (csrc/core/tree_reduce.h): 16-bit floats that are
rounded once, at the root of the tree, travel as float32 where they have been combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lockstep.comm.bucket import round_up
from lockstep.comm.hosts.compression import Codec
from lockstep.comm.hosts.map import HostMap
from lockstep.comm.hosts.reduction_pipeline import (
    COMPARED,
    SLOTS,
    Agreement,
    Pipeline,
    Values,
)
from lockstep.comm.hosts.reduction_plan import ReductionPlan, plan_reduction, slice_bounds
from lockstep.comm.reduction_arithmetic import Reduction

__all__ = ["Group", "HostReducer", "chunk_length"]

CHUNK_BYTES = 1 << 20
"""The bytes of a chunk, of all slices together, by measurement: see LOG.md."""

LEAST_MESSAGE_BYTES = 128 << 10
"""A chunk is not smaller than this per slice, unless the slice is."""


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
        agreement: Agreement = COMPARED,
    ) -> None:
        """Reduce a contiguous tensor over all ranks, in place.

        Args:
            tensor: The tensor, of the same dtype and number of elements on every rank.
            number: The number of the reduction in `torch.distributed.ReduceOp`.
            factors: The factor of each rank, for PREMUL_SUM.
            agreement: What the ranks have in common.
        """
        self._reduce_whole(tensor, number, factors, None, agreement)

    def reduce(
        self,
        tensor: torch.Tensor,
        number: int,
        root: int,
        factors: Sequence[float] = (),
        agreement: Agreement = COMPARED,
    ) -> None:
        """Reduce a contiguous tensor to rank `root`; the tensors of other ranks do not change."""
        self._reduce_whole(tensor, number, factors, root, agreement)

    def reduce_scatter(
        self,
        inputs: Sequence[torch.Tensor],
        output: torch.Tensor,
        number: int,
        factors: Sequence[float] = (),
        agreement: Agreement = COMPARED,
    ) -> None:
        """Reduce a contiguous tensor per rank; rank r gets the result of tensor r.

        Args:
            inputs: A tensor for each rank, with the number of elements of its output.
            output: This rank's result.
            number: The number of the reduction.
            factors: The factor of each rank, for PREMUL_SUM.
            agreement: As for `all_reduce`.
        """
        reduction = Reduction(output.dtype, number, len(inputs), factors)
        plan = self._plan(reduction, None, scatter=True)
        sources = [each.view(-1) for each in inputs]
        targets: list[torch.Tensor | None] = [None] * len(inputs)
        targets[self.rank] = output.view(-1)
        self._run_staged(plan, reduction, sources, targets, agreement)

    def _reduce_whole(
        self,
        tensor: torch.Tensor,
        number: int,
        factors: Sequence[float],
        root: int | None,
        agreement: Agreement,
    ) -> None:
        reduction = Reduction(tensor.dtype, number, self._group.map.size, factors)
        plan = self._plan(reduction, root, scatter=False)
        flat = tensor.view(-1)
        bounds = slice_bounds(flat.numel(), len(plan.owners), flat.dtype.itemsize)
        slices = [flat[lo:hi] for lo, hi in pairwise(bounds)]
        is_target = root is None or root == self.rank
        targets = slices if is_target else [None] * len(slices)
        self._run_staged(plan, reduction, slices, targets, agreement)

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
        agreement: Agreement,
    ) -> None:
        sizes = [each.numel() for each in sources]
        chunk = chunk_length(sizes, reduction.dtype.itemsize)
        if self._staging is None:
            agreement = agreement.joined()
            self._staging = self._group.local.share(SLOTS * self._ranks * CHUNK_BYTES)
        values = StagedValues(self, plan, sources, targets, chunk)
        chunks = self.run(plan, reduction, values, sizes, chunk, agreement=agreement)
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
        agreement: Agreement = COMPARED,
    ) -> int:
        """Pass all chunks of slices of these sizes through the pipeline; return their number."""
        return Pipeline(self, plan, reduction, values, sizes, chunk, codec, agreement).run()


def chunk_length(sizes: Sequence[int], itemsize: int) -> int:
    """Return the number of elements of a chunk of one slice, in whole cache lines."""
    line = max(64 // itemsize, 1)
    most = CHUNK_BYTES // len(sizes) // itemsize // line * line
    largest = max(sizes, default=0)
    least = LEAST_MESSAGE_BYTES // itemsize
    quarter = round_up(round_up(largest, 4) // 4, line)
    return max(line, min(most, max(least, quarter)))
