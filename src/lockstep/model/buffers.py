"""Buffers: what micro-batches write besides gradients (batch-norm statistics).

    step's buffers ──copy──> micro-batch 0 ──> result 0 ┐ all the same bits: adopted
                   ──copy──> micro-batch 1 ──> result 1 ┤ floating, different: tree mean,
                   ──copy──> micro-batch 2 ──> result 2 ┘   weighted by samples
                                                          other, different: an error

Every micro-batch starts from the step's buffers, so that what it computes does
not depend on who computed the one before. This differs on purpose from
DistributedDataParallel, which gives everybody the buffers of rank 0. The mean
is added in float32 (float64 stays float64) and rounded once.

What counts is bits, not writes: batch norm writes its statistics without
telling autograd's version counter.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.bucket import plan
from lockstep.comm.collectives import as_bytes, broadcast_tensors
from lockstep.comm.reproducible_all_reduce import (
    ReproducibleAllReduce,
    add_lists,
    reproducible_all_reduce,
)
from lockstep.comm.tree import Fold, Node
from lockstep.errors import BufferMismatchError

__all__ = ["Buffers", "Finding", "Paused", "Seen"]

Finding = str
"""What one rank reports of one buffer: the hash of its results, `START` or `DIFFER`."""

Paused = list[tuple[torch.Tensor | None, torch.Tensor | None]]
"""Of each buffer what a micro-batch made of it so far, and the copy that it was given."""

Seen = list[tuple["_Slot", torch.Tensor | None]]
"""What a call of a module found in its buffers."""

START = ""  # they are what the step began with
DIFFER = "differ"

BUCKET_BYTES = 4 << 20


@dataclass
class _Slot:
    """One buffer: its tensor, the places where it is registered, a copy that can be used again."""

    name: str
    tensor: torch.Tensor
    places: list[tuple[nn.Module, str]]
    copy: torch.Tensor | None = None
    overlaps: bool = False


def _slots(modules: Mapping[str, nn.Module]) -> list[_Slot]:
    found: dict[int, _Slot] = {}
    for root, model in modules.items():
        for prefix, module in model.named_modules():
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    full_name = ".".join(part for part in (root, prefix, name) if part)
                    slot = found.setdefault(id(tensor), _Slot(full_name, tensor, []))
                    slot.places.append((module, name))
    storages = [slot.tensor.untyped_storage().data_ptr() for slot in found.values()]
    counts = Counter(storages)
    for slot, storage in zip(found.values(), storages, strict=True):
        slot.overlaps = slot.tensor.numel() > 0 and counts[storage] > 1
    return list(found.values())


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left is right:
        return True
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(as_bytes(left.contiguous()), as_bytes(right.contiguous()))


class Buffers:
    """The buffers of some modules, by name, during one step."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._slots = _slots(modules)
        self._results: dict[int, list[torch.Tensor]] = {}
        self._shares: dict[int, float] = {}

    def tensors(self) -> list[torch.Tensor]:
        """Return the step's buffers."""
        return [slot.tensor for slot in self._slots]

    def enter(self) -> None:
        """Put a copy of the step's buffers into the model."""
        for slot in self._slots:
            if slot.copy is None:
                slot.copy = slot.tensor.detach().clone()
            for module, name in slot.places:
                module._buffers[name] = slot.copy

    def leave(self, microbatch: int, share: float) -> None:
        """Take the buffers as `microbatch` left them; `share` is its part of the samples."""
        self._results[microbatch] = [self._left(slot) for slot in self._slots]
        self._shares[microbatch] = share

    def pause(self) -> Paused:
        """Take out what the micro-batch in the model made so far; another one may enter."""
        held = [(module._buffers[name], slot.copy) for slot, (module, name) in self._first()]
        for slot in self._slots:
            slot.copy = None
        self.restore()
        return held

    def resume(self, held: Paused) -> None:
        """Put back what `pause` returned."""
        for slot, (tensor, copy) in zip(self._slots, held, strict=True):
            slot.copy = copy
            for module, name in slot.places:
                module._buffers[name] = tensor

    def _first(self) -> Iterator[tuple[_Slot, tuple[nn.Module, str]]]:
        for slot in self._slots:
            yield slot, slot.places[0]

    def restore(self) -> None:
        """Put the step's buffers back as they were when it began."""
        for slot in self._slots:
            for module, name in slot.places:
                module._buffers[name] = slot.tensor

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Let the body write into a copy of the buffers that nobody keeps."""
        for slot in self._slots:
            slot.copy = None
        self.enter()
        try:
            yield
        finally:
            self.restore()

    def seen_by(self, module: nn.Module) -> Seen:
        """Return what a call of `module` that begins now finds in its buffers."""
        inside = set(module.modules())
        return [
            (slot, self._found(slot))
            for slot in self._slots
            if any(holder in inside for holder, _ in slot.places)
        ]

    @contextmanager
    def again(self, seen: Seen) -> Iterator[None]:
        """Let the body repeat a call, on copies of the buffers that it saw; nobody keeps them."""
        held = [
            (module, name, module._buffers[name])
            for slot, _ in seen
            for module, name in slot.places
        ]
        for slot, tensor in seen:
            copy = None if tensor is None else tensor.clone()
            for module, name in slot.places:
                module._buffers[name] = copy
        try:
            yield
        finally:
            for module, name, tensor in held:
                module._buffers[name] = tensor

    def _found(self, slot: _Slot) -> torch.Tensor | None:
        """Return what is in the model of a buffer: the step's own tensor where it is the same."""
        module, name = slot.places[0]
        tensor = module._buffers[name]
        if tensor is None or _same_bits(tensor, slot.tensor):
            return slot.tensor if tensor is not None else None
        return tensor.detach().clone()

    def findings(self, alone: bool = False) -> list[Finding]:
        """Return for every buffer the hash of this rank's results; nothing if it has none.

        `alone` there is nobody to compare with, and no hash is computed. Raises
        BufferMismatchError for a buffer that was not there when the step began.
        """
        if len(now := _slots(self._modules)) != len(self._slots):
            known = {slot.name for slot in self._slots}
            (new, *_) = [slot.name for slot in now if slot.name not in known] or ["(one is gone)"]
            raise BufferMismatchError(
                f"buffer {new} came into being in a training step, so that each rank would have "
                "another one: give it a value before training"
            )
        if not self._results:
            return []
        return [
            self._finding(slot, column, alone)
            for slot, column in zip(
                self._slots, zip(*self._results.values(), strict=True), strict=True
            )
        ]

    @torch.no_grad()
    def merge(
        self,
        findings: Sequence[Sequence[Finding]],
        holders: Sequence[Sequence[Node]],
        leaves: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Write the step's outcome into the restored buffers, given what every rank found.

        `holders` are the nodes of each rank, as for the gradients. Raises
        `BufferMismatchError` for a buffer whose results differ and have no mean.
        """
        reports = [report for report in findings if report]
        columns = [set(column) for column in zip(*reports, strict=True)]
        differing = [n for n, seen in enumerate(columns) if DIFFER in seen or len(seen) > 1]
        changed = [n for n, seen in enumerate(columns) if seen != {START} and n not in differing]
        for number in differing:
            self._require_mean(self._slots[number])
        if self._results:
            first = next(iter(self._results.values()))
            for number in changed:
                self._slots[number].tensor.copy_(first[number])
        if len(reports) < len(findings) and changed:
            # Some rank computed nothing of this batch: it gets them from one that did.
            source = next(rank for rank, report in enumerate(findings) if report)
            broadcast_tensors([self._slots[number].tensor for number in changed], group, source)
        for number, mean in self._means(differing, holders, leaves, group):
            self._slots[number].tensor.copy_(mean)

    def _left(self, slot: _Slot) -> torch.Tensor:
        """Return what a micro-batch left of a buffer: the slot's own tensor where it wrote nothing.

        The copy then serves the next micro-batch too.
        """
        module, name = slot.places[0]
        result = module._buffers[name]
        if result is None or result.shape != slot.tensor.shape:
            raise BufferMismatchError(
                f"buffer {slot.name} changed its shape in a training step: buffers must keep "
                f"their shape {tuple(slot.tensor.shape)}"
            )
        if _same_bits(result, slot.tensor):
            if result is not slot.copy:
                slot.copy = None
            return slot.tensor
        if slot.overlaps:
            raise BufferMismatchError(
                f"buffer {slot.name} shares its memory with another buffer and was written in a "
                "training step: make it a buffer of its own (.clone())"
            )
        slot.copy = None
        return result.detach()

    def _finding(self, slot: _Slot, results: Sequence[torch.Tensor], alone: bool) -> Finding:
        first, *others = results
        if not all(_same_bits(first, other) for other in others):
            return DIFFER
        if first is slot.tensor:
            return START
        return "same" if alone else _hash(first)

    def _means(
        self,
        differing: Sequence[int],
        holders: Sequence[Sequence[Node]],
        leaves: int,
        group: dist.ProcessGroup | None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Add the weighted results of the buffers in `differing` along the tree."""
        if not differing:
            return
        slots = [self._slots[number].tensor for number in differing]
        dtypes = [_accumulator(tensor.dtype) for tensor in slots]
        fold: Fold[list[torch.Tensor | None]] = Fold(leaves, add_lists)
        rank = dist.get_rank(group) if len(holders) > 1 else 0
        for lo, hi in holders[rank]:
            for leaf in range(lo, hi):
                fold.put((leaf, leaf + 1), self._terms(leaf, differing, dtypes))
        if len(holders) == 1:
            (sums,) = fold.nodes.values()
            pairs = list(enumerate(sums))
        else:
            buckets = plan([tensor.numel() for tensor in slots], dtypes, BUCKET_BYTES)
            device = slots[0].device
            pairs = reproducible_all_reduce(
                [
                    ReproducibleAllReduce(bucket, holders, leaves, device, group)
                    for bucket in buckets
                ],
                fold.nodes,
            )
        for index, mean in pairs:
            assert mean is not None
            yield differing[index], mean.view(slots[index].shape)

    def _terms(
        self, leaf: int, differing: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor | None]:
        """Return the weighted results of one micro-batch; nothing where it was left out."""
        if leaf not in self._results:
            return [None] * len(differing)
        return [
            self._results[leaf][number].to(dtype).contiguous() * self._shares[leaf]
            for number, dtype in zip(differing, dtypes, strict=True)
        ]

    def _require_mean(self, slot: _Slot) -> None:
        if not slot.tensor.is_floating_point():
            raise BufferMismatchError(
                f"buffer {slot.name} ({slot.tensor.dtype}) got different values in different "
                "micro-batches, and only floating numbers have a mean here: let it be floating, "
                "or write it outside of the training step"
            )


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _hash(tensor: torch.Tensor) -> str:
    data = as_bytes(tensor.cpu().contiguous()).numpy().data
    return hashlib.blake2b(data, digest_size=8).hexdigest()
