"""Buffers during a step: state that micro-batches write, such as batch-norm statistics.

    buffers of the step ──copy──> micro-batch 0 ──> result 0 ┐
                        ──copy──> micro-batch 1 ──> result 1 ┤ merged by the rule of the buffer
                        ──copy──> micro-batch 2 ──> result 2 ┘

    mean     the mean along the tree, weighted by samples; results of equal bits are kept as such
    sum      the value at the start of the step, plus the changes added along the tree
    last     the result of the last micro-batch
    equal    the result of all micro-batches; an error if two of them differ

Every micro-batch starts from the buffers of the step, so its results do not depend on the
rank that computed the previous one. This differs on purpose from DistributedDataParallel,
which broadcasts the buffers of rank 0. Nothing in the results tells a mean from a sum, so a module
declares the rules of its buffers in `lockstep_buffer_rules`, and a buffer that a step changes
without a rule is an error. torch's batch norm and spectral norm have rules. Means and sums are
computed in float32 (float64 for float64) and rounded once; sums of integers are exact.

Changes are detected by comparing bits instead of version counters, which batch norm does not
increment when it writes its statistics.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

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
from lockstep.kernel.errors import BufferMismatchError
from lockstep.kernel.tree import Node, TreeAccumulator
from lockstep.model.buffer_rules import ATTRIBUTE, find_rule
from lockstep.model.deferred_init import make_released

__all__ = [
    "BufferHash",
    "BufferReport",
    "BufferSnapshot",
    "Buffers",
    "PausedBuffers",
    "merge_reports",
]

BufferHash = str
"""The hash of one rank's results for one buffer, or one of the marks below."""

PausedBuffers = list[tuple[torch.Tensor | None, torch.Tensor | None]]
"""For each buffer, its value in a paused micro-batch, and the copy that was installed."""

BufferSnapshot = list[tuple["_Slot", torch.Tensor | None]]
"""The values of a module's buffers at the start of a call."""

UNCHANGED = ""  # the results equal the buffer at the start of the step
DIVERGED = "differ"  # micro-batches of the same rank, or of two ranks, have different results
SUM, LAST = "+", ">"  # changed, and merged by this rule
EQUAL = "="  # the first character of a hash of results that must be equal
REFUSED = "!"  # the results cannot be merged
MARKS = {"sum": SUM, "last": LAST}

BUCKET_BYTES = 4 << 20


class BufferReport(NamedTuple):
    """The results of some replicas for the buffers of a part of the model.

    Attributes:
        hashes: The hashes; empty if no replica computed a micro-batch.
        source: The lowest replica that computed one; -1 if none did.
        is_everyone: Whether all did.
        last: The last micro-batch that was computed; -1 if none was.
    """

    hashes: list[BufferHash]
    source: int = 0
    is_everyone: bool = True
    last: int = -1

    @property
    def is_refused(self) -> bool:
        """Whether the results for a buffer cannot be merged."""
        return REFUSED in self.hashes

    def of_replica(self, replica: int) -> BufferReport:
        """Return the report as that of one replica."""
        return self._replace(source=replica if self.hashes else -1, is_everyone=bool(self.hashes))


def merge_reports(left: BufferReport, right: BufferReport) -> BufferReport:
    """Return the report of two adjacent ranges of replicas, the lower one first."""
    if not left.hashes or not right.hashes:
        return (left if left.hashes else right)._replace(is_everyone=False)
    hashes = left.hashes
    if left.hashes != right.hashes:
        pairs = zip(left.hashes, right.hashes, strict=True)
        hashes = [one if one == two else _merge_hashes(one, two) for one, two in pairs]
    is_everyone = left.is_everyone and right.is_everyone
    return BufferReport(hashes, left.source, is_everyone, max(left.last, right.last))


def _merge_hashes(one: BufferHash, two: BufferHash) -> BufferHash:
    for mark in (REFUSED, SUM, LAST):
        if mark in (one, two):
            return mark
    return REFUSED if (one or two).startswith(EQUAL) else DIVERGED


@dataclass
class _Slot:
    """One buffer: its tensor, the modules that register it, and a reusable copy."""

    name: str
    tensor: torch.Tensor
    places: list[tuple[nn.Module, str]]
    copy: torch.Tensor | None = None
    overlaps: bool = False
    hidden: torch.Tensor | None = None
    problem: str = ""

    def find_rule(self) -> str | None:
        """Return the rule by which results are merged; None if no module has one."""
        rules = (find_rule(module, name) for module, name in self.places)
        return next((rule for rule in rules if rule is not None), None)

    def describe_refusal(self) -> str:
        """Return why the results cannot be merged."""
        if self.problem:
            return self.problem
        (module, name), rule = self.places[0], self.find_rule()
        kind = type(module).__name__
        if rule is not None:
            return (
                f'buffer {self.name} has the rule "{rule}", and got different values in different '
                f"micro-batches: choose another rule in {ATTRIBUTE} of {kind}, or write the buffer "
                "after the step"
            )
        return (
            f"buffer {self.name} was written in a training step, and nothing tells how the results "
            f"of micro-batches are merged, each of which began with the same value: write "
            f'{ATTRIBUTE} = {{"{name}": RULE}} into the class {kind}, or set it on the module, '
            'where RULE is "sum" for a count or another sum over the samples, "mean" for running '
            'statistics, "equal" for a step counter or a cache that is alike in all micro-batches, '
            'or "last"; or write the buffer after the step, from the whole batch'
        )


def _find_slots(modules: Mapping[str, nn.Module]) -> list[_Slot]:
    found: dict[int, _Slot] = {}
    for root, model in modules.items():
        # Names take time, and many steps are of models without buffers.
        if not any(each._buffers for each in _iterate_modules(model)):
            continue
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


def _iterate_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all modules inside it, each once, in any order.

    `nn.Module.modules` takes three times as long.
    """
    waiting = [model]
    seen = {model}
    while waiting:
        module = waiting.pop()
        yield module
        for each in module._modules.values():
            if each is not None and each not in seen:
                seen.add(each)
                waiting.append(each)


def _count_buffers(modules: Mapping[str, nn.Module]) -> int:
    found = {
        id(tensor)
        for model in modules.values()
        for module in _iterate_modules(model)
        for tensor in module._buffers.values()
        if tensor is not None
    }
    return len(found)


def _has_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left is right:
        return True
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(as_bytes(left.contiguous()), as_bytes(right.contiguous()))


class Buffers:
    """The buffers of some modules, by name, during one step."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._slots = _find_slots(modules)
        self._results: dict[int, list[torch.Tensor]] = {}
        self._shares: dict[int, float] = {}

    def tensors(self) -> list[torch.Tensor]:
        """Return the step's buffers."""
        return [slot.tensor for slot in self._slots]

    def current(self) -> dict[str, torch.Tensor]:
        """Return the buffers of the current micro-batch by name, without those set to None."""
        found = {
            slot.name: module._buffers[name] for slot, (module, name) in self._iterate_places()
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def install_copies(self) -> None:
        """Install copies of the step's buffers in the model."""
        for slot in self._slots:
            if slot.copy is None:
                slot.copy = slot.tensor.detach().clone()
            for module, name in slot.places:
                module._buffers[name] = slot.copy

    def collect(self, microbatch: int, share: float) -> None:
        """Collect the buffers after a micro-batch; `share` is its share of the samples."""
        self._results[microbatch] = [self._read_result(slot) for slot in self._slots]
        self._shares[microbatch] = share

    def pause(self) -> PausedBuffers:
        """Remove and return the buffers of the current micro-batch, so that another can start."""
        held = [
            (module._buffers[name], slot.copy) for slot, (module, name) in self._iterate_places()
        ]
        for slot in self._slots:
            slot.copy = None
        self.restore()
        return held

    def resume(self, held: PausedBuffers) -> None:
        """Install the buffers that `pause` returned."""
        for slot, (tensor, copy) in zip(self._slots, held, strict=True):
            slot.copy = copy
            for module, name in slot.places:
                module._buffers[name] = tensor

    def hide(self) -> None:
        """Install tensors that blocks of another stage cannot read, until the next micro-batch."""
        for slot in self._slots:
            if slot.hidden is None:
                slot.hidden = make_released(slot.tensor, slot.name)
            for module, name in slot.places:
                module._buffers[name] = slot.hidden

    def _iterate_places(self) -> Iterator[tuple[_Slot, tuple[nn.Module, str]]]:
        for slot in self._slots:
            yield slot, slot.places[0]

    def restore(self) -> None:
        """Install the step's buffers, with their values from its beginning."""
        for slot in self._slots:
            for module, name in slot.places:
                module._buffers[name] = slot.tensor

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Run the body on copies of the buffers, which are discarded."""
        for slot in self._slots:
            slot.copy = None
        self.install_copies()
        try:
            yield
        finally:
            self.restore()

    def take_snapshot(self, module: nn.Module) -> BufferSnapshot:
        """Return the current values of a module's buffers."""
        inside = set(module.modules())
        return [
            (slot, self._read_current(slot))
            for slot in self._slots
            if any(holder in inside for holder, _ in slot.places)
        ]

    @contextmanager
    def restore_snapshot(self, seen: BufferSnapshot) -> Iterator[None]:
        """Install copies of a snapshot in the body, which repeats a call; then discard them."""
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

    def _read_current(self, slot: _Slot) -> torch.Tensor | None:
        """Return the current value of a buffer: the step's own tensor if it has the same bits."""
        module, name = slot.places[0]
        tensor = module._buffers[name]
        if tensor is None or _has_same_bits(tensor, slot.tensor):
            return slot.tensor if tensor is not None else None
        return tensor.detach().clone()

    def hash_results(self, is_alone: bool = False) -> BufferReport:
        """Return the hash of this rank's results for every buffer.

        Args:
            is_alone: Whether there is no other rank to compare with, so that no hash is needed.

        Returns:
            The hashes; none if this rank computed no micro-batches.

        Raises:
            BufferMismatchError: A buffer was registered or removed during the step.
        """
        if _count_buffers(self._modules) != len(self._slots):
            known = {slot.name for slot in self._slots}
            now = [slot.name for slot in _find_slots(self._modules)]
            (new, *_) = [name for name in now if name not in known] or ["(one is gone)"]
            raise BufferMismatchError(
                f"buffer {new} was registered in a training step, so each rank would have a "
                "different one: register it before training"
            )
        if not self._results:
            return BufferReport([])
        columns = zip(*self._results.values(), strict=True)
        hashes = [
            self._hash_result(slot, column, is_alone)
            for slot, column in zip(self._slots, columns, strict=True)
        ]
        return BufferReport(hashes, last=max(self._results))

    def describe_refusal(self, report: BufferReport) -> tuple[bool, str]:
        """Return why the results for a buffer here cannot be merged; "" if they can.

        Returns:
            Whether the reason is certain, and the reason. It is not if the results of another rank
            are not as expected.
        """
        pairs = zip(self._slots, report.hashes, strict=False)
        refused = [slot for slot, mark in pairs if mark == REFUSED]
        slot = next((slot for slot in refused if slot.problem), next(iter(refused), None))
        return (False, "") if slot is None else (bool(slot.problem), slot.describe_refusal())

    @torch.no_grad()
    def merge(
        self,
        report: BufferReport,
        holders: Sequence[Sequence[Node]],
        leaves: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Write the merged results of the step into the restored buffers.

        Args:
            report: The merged report of all replicas.
            holders: The nodes of the tree that each rank holds, as for the gradients.
            leaves: The number of micro-batches.
            group: The group of the ranks that hold these buffers.

        Raises:
            BufferMismatchError: The results for a buffer cannot be merged.
        """
        if report.is_refused:
            raise BufferMismatchError(self.describe_refusal(report)[1])
        folded = [n for n, each in enumerate(report.hashes) if each in (DIVERGED, SUM)]
        last = [n for n, each in enumerate(report.hashes) if each == LAST]
        other = (UNCHANGED, DIVERGED, SUM, LAST)
        changed = [n for n, each in enumerate(report.hashes) if each not in other]
        if self._results:
            first = next(iter(self._results.values()))
            for number in changed:
                self._slots[number].tensor.copy_(first[number])
        if not report.is_everyone and changed:
            # A rank without micro-batches receives the results from one that has some.
            tensors = [self._slots[number].tensor for number in changed]
            broadcast_tensors(tensors, group, report.source)
        if last:
            for number in last if report.last in self._results else ():
                self._slots[number].tensor.copy_(self._results[report.last][number])
            if len(holders) > 1:
                owner = next(
                    rank
                    for rank, nodes in enumerate(holders)
                    if any(lo <= report.last < hi for lo, hi in nodes)
                )
                broadcast_tensors([self._slots[number].tensor for number in last], group, owner)
        sums = {number for number in folded if report.hashes[number] == SUM}
        for number, value in self._fold(folded, sums, holders, leaves, group):
            tensor = self._slots[number].tensor
            tensor.copy_(tensor.to(value.dtype) + value if number in sums else value)

    def _read_result(self, slot: _Slot) -> torch.Tensor:
        """Return a buffer after a micro-batch: the slot's own tensor if nothing was written.

        The copy is then reused for the next micro-batch.
        """
        module, name = slot.places[0]
        result = module._buffers[name]
        if result is None or result.shape != slot.tensor.shape:
            now = "None" if result is None else f"{tuple(result.shape)}"
            slot.problem = (
                f"buffer {slot.name} changed its shape in a training step: buffers must keep "
                f"their shape, here {tuple(slot.tensor.shape)}, which became {now}; keep what has "
                "another size in every micro-batch in an attribute, or let it have its largest size"
            )
            slot.copy = None
            return slot.tensor
        if _has_same_bits(result, slot.tensor):
            if result is not slot.copy:
                slot.copy = None
            return slot.tensor
        if slot.overlaps:
            slot.problem = (
                f"buffer {slot.name} shares its memory with another buffer and was written in a "
                "training step: give it separate memory (.clone())"
            )
        slot.copy = None
        return result.detach()

    def _hash_result(
        self, slot: _Slot, results: Sequence[torch.Tensor], is_alone: bool
    ) -> BufferHash:
        if slot.problem:
            return REFUSED
        if all(result is slot.tensor for result in results):
            return UNCHANGED
        rule = slot.find_rule()
        if rule is None:
            return REFUSED
        if rule in MARKS:
            return MARKS[rule]
        first, *others = results
        if not all(_has_same_bits(first, other) for other in others):
            return DIVERGED if rule == "mean" else REFUSED
        return ("" if rule == "mean" else EQUAL) + ("same" if is_alone else _hash(first))

    def _fold(
        self,
        folded: Sequence[int],
        sums: Collection[int],
        holders: Sequence[Sequence[Node]],
        leaves: int,
        group: dist.ProcessGroup | None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Add the weighted results, or for `sums` the changes, of buffers along the tree."""
        if not folded:
            return
        slots = [self._slots[number].tensor for number in folded]
        dtypes = [_get_accumulation_dtype(tensor.dtype) for tensor in slots]
        fold: TreeAccumulator[list[torch.Tensor | None]] = TreeAccumulator(leaves, add_lists)
        rank = dist.get_rank(group) if len(holders) > 1 else 0
        for lo, hi in holders[rank]:
            for leaf in range(lo, hi):
                fold.put((leaf, leaf + 1), self._get_terms(leaf, folded, sums, dtypes))
        if len(holders) == 1:
            (added,) = fold.nodes.values()
            pairs = list(enumerate(added))
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
        for index, value in pairs:
            assert value is not None
            yield folded[index], value.view(slots[index].shape)

    def _get_terms(
        self,
        leaf: int,
        folded: Sequence[int],
        sums: Collection[int],
        dtypes: Sequence[torch.dtype],
    ) -> list[torch.Tensor | None]:
        """Return the terms of one micro-batch; None if it was skipped."""
        if leaf not in self._results:
            return [None] * len(folded)
        terms: list[torch.Tensor | None] = []
        for number, dtype in zip(folded, dtypes, strict=True):
            result = self._results[leaf][number].to(dtype).contiguous()
            start = self._slots[number].tensor
            terms.append(
                result - start.to(dtype) if number in sums else result * self._shares[leaf]
            )
        return terms


def _get_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype == torch.float64 else torch.float32


def _hash(tensor: torch.Tensor) -> str:
    data = as_bytes(tensor.cpu().contiguous()).numpy().data
    return hashlib.blake2b(data, digest_size=8).hexdigest()
