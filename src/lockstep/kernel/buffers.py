"""Rule 5, buffers during a step: state that micro-batches write, such as batch-norm statistics.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from lockstep.kernel.buffer_rules import ATTRIBUTE, find_rule
from lockstep.kernel.errors import BufferMismatchError
from lockstep.kernel.tree import Node, TensorList, TreeAccumulator

__all__ = [
    "BufferExchange",
    "BufferHash",
    "BufferReport",
    "BufferSlot",
    "Buffers",
    "as_bytes",
    "have_same_bits",
    "merge_reports",
]

BufferHash = str
"""The hash of one rank's results for one buffer, or one of the marks below."""

UNCHANGED = ""  # the results equal the buffer at the start of the step
DIVERGED = "differ"  # micro-batches of the same rank, or of two ranks, have different results
# changed, and merged by this rule
SUM = "+"
LAST = ">"
EQUAL = "="  # the first character of a hash of results that must be equal
REFUSED = "!"  # the results cannot be merged
MARKS = {"sum": SUM, "last": LAST}


class BufferExchange(Protocol):
    """The calls by which the ranks that hold the same buffers merge them."""

    rank: int

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Overwrite tensors on every rank with those of rank `source`, bit for bit."""

    def add(
        self,
        sums: Mapping[Node, TensorList],
        like: Sequence[torch.Tensor],
        nodes_by_rank: Sequence[Sequence[Node]],
        leaves: int,
    ) -> TensorList:
        """Return the sums along the tree of the nodes of all ranks.

        Args:
            sums: The nodes of this rank, as `nodes_by_rank` lists them.
            like: Tensors of the shapes and dtypes of the sums.
            nodes_by_rank: The nodes that each rank holds.
            leaves: The number of micro-batches.
        """


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
class BufferSlot:
    """One buffer of a model.

    Attributes:
        name: Its name in the model.
        tensor: The tensor with the value at the start of the step.
        registrations: The modules that register it, and its names in them.
        copy: The tensor of the current micro-batch, which the next one reuses if nothing was
            written.
        overlaps: Whether it shares its memory with another buffer.
        problem: Why no rule can merge the results; "" if one can.
    """

    name: str
    tensor: torch.Tensor
    registrations: list[tuple[nn.Module, str]]
    copy: torch.Tensor | None = None
    overlaps: bool = False
    problem: str = ""

    def install(self, tensor: torch.Tensor | None) -> None:
        """Let the modules use a tensor as this buffer."""
        for module, name in self.registrations:
            module._buffers[name] = tensor

    def find_rule(self) -> str | None:
        """Return the rule by which results are merged; None if no module has one."""
        rules = (find_rule(module, name) for module, name in self.registrations)
        return next((rule for rule in rules if rule is not None), None)

    def describe_refusal(self) -> str:
        """Return why the results cannot be merged."""
        if self.problem:
            return self.problem
        module, name = self.registrations[0]
        rule = self.find_rule()
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


def _find_slots(modules: Mapping[str, nn.Module]) -> list[BufferSlot]:
    by_tensor: dict[int, BufferSlot] = {}
    for root, model in modules.items():
        for prefix, module in model.named_modules():
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    full_name = ".".join(part for part in (root, prefix, name) if part)
                    slot = by_tensor.setdefault(id(tensor), BufferSlot(full_name, tensor, []))
                    slot.registrations.append((module, name))
    storages = [slot.tensor.untyped_storage().data_ptr() for slot in by_tensor.values()]
    counts = Counter(storages)
    for slot, storage in zip(by_tensor.values(), storages, strict=True):
        slot.overlaps = slot.tensor.numel() > 0 and counts[storage] > 1
    return list(by_tensor.values())


def _list_buffers(models: Mapping[str, nn.Module]) -> list[torch.Tensor]:
    """Return the buffers of models in any order; one that is registered twice may occur twice.

    `nn.Module.buffers` takes several times as long.
    """
    buffers: list[torch.Tensor] = []
    modules: list[nn.Module | None] = [*models.values()]
    seen = {None, *modules}
    for module in modules:  # which grows meanwhile
        assert module is not None
        if module._buffers:
            buffers += [tensor for tensor in module._buffers.values() if tensor is not None]
        if module._modules:
            children = {*module._modules.values()} - seen
            seen |= children
            modules += children
    return buffers


def have_same_bits(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return whether the tensors of each pair have the same dtype, shape and bits.

    -0.0 is not 0.0, and a NaN may be equal. The process waits for an accelerator once.
    """
    same: list[Any] = []
    for left, right in pairs:
        is_alike = left.dtype == right.dtype and left.shape == right.shape
        if left is right or not is_alike:
            same.append(is_alike)
        else:
            compare = torch.equal if left.is_cpu else torch.ne
            same.append(compare(as_bytes(left.contiguous()), as_bytes(right.contiguous())))
    flags = [one.any() for one in same if isinstance(one, torch.Tensor)]
    differ = iter(torch.stack(flags).tolist() if flags else ())
    return [one if isinstance(one, bool) else not next(differ) for one in same]


class Buffers:
    """The buffers of some modules, by name, during one step.

    Attributes:
        slots: The buffers.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self.slots = _find_slots(modules) if _list_buffers(modules) else []  # names take time
        self._results: dict[int, list[torch.Tensor]] = {}
        self._shares: dict[int, float] = {}

    def tensors(self) -> list[torch.Tensor]:
        """Return the step's buffers."""
        return [slot.tensor for slot in self.slots]

    def current(self) -> dict[str, torch.Tensor]:
        """Return the buffers of the current micro-batch by name, without those set to None."""
        pairs = zip(self.slots, self._find_first(), strict=True)
        current = {slot.name: module._buffers[key] for slot, (module, key) in pairs}
        return {name: tensor for name, tensor in current.items() if tensor is not None}

    def install_copies(self) -> None:
        """Install copies of the step's buffers in the model."""
        for slot in self.slots:
            if slot.copy is None:
                slot.copy = slot.tensor.detach().clone()
            slot.install(slot.copy)

    def collect(
        self, microbatch: int, share: float, results: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Collect the buffers after a micro-batch.

        Args:
            microbatch: Its index.
            share: Its share of the samples.
            results: The buffers; None: those of the modules.
        """
        if results is None:
            results = [self._read_result(slot) for slot in self.slots]
        same = have_same_bits(list(zip(results, self.tensors(), strict=True)))
        self._results[microbatch] = list(map(self._keep, self.slots, results, same))
        self._shares[microbatch] = share

    def find_difference(self, microbatch: int, results: Sequence[torch.Tensor]) -> str:
        """Return the first buffer with other bits than were collected; "" if there is none."""
        if not self.slots:
            return ""
        same = have_same_bits([*zip(self._results[microbatch], results, strict=True)])
        return "" if all(same) else self.slots[same.index(False)].name

    def adopt(self, earlier: Buffers) -> None:
        """Continue with the results of an attempt at the same step."""
        self._results = earlier._results
        self._shares = earlier._shares

    def restore(self) -> None:
        """Install the step's buffers, with their values from its beginning."""
        for slot in self.slots:
            slot.install(slot.tensor)

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Run the body on copies of the buffers, which are discarded."""
        for slot in self.slots:
            slot.copy = None
        self.install_copies()
        try:
            yield
        finally:
            self.restore()

    @contextmanager
    def discard_writes(self) -> Iterator[None]:
        """Run the body, in the middle of a micro-batch, on copies of its buffers."""
        installed = [module._buffers[name] for module, name in self._find_first()]
        for slot, tensor in zip(self.slots, installed, strict=True):
            slot.install(None if tensor is None else tensor.detach().clone())
        try:
            yield
        finally:
            for slot, tensor in zip(self.slots, installed, strict=True):
                slot.install(tensor)

    def _find_first(self) -> list[tuple[nn.Module, str]]:
        """Return a module that registers each buffer, and the name there."""
        return [slot.registrations[0] for slot in self.slots]

    def hash_results(self, is_alone: bool = False) -> BufferReport:
        """Return the hash of this rank's results for every buffer.

        Args:
            is_alone: Whether there is no other rank to compare with, so that no hash is needed.

        Returns:
            The hashes; none if this rank computed no micro-batches.

        Raises:
            BufferMismatchError: A buffer was registered or removed during the step.
        """
        if len({*map(id, _list_buffers(self._modules))}) != len(self.slots):
            known = {slot.name for slot in self.slots}
            now = [slot.name for slot in _find_slots(self._modules)]
            (new, *_) = [name for name in now if name not in known] or ["(one is gone)"]
            raise BufferMismatchError(
                f"buffer {new} was registered in a training step, so each rank would have a "
                "different one: register it before training"
            )
        if not self._results:
            return BufferReport([])
        first, *others = self._results.values()
        equal = list(range(len(self.slots)))
        for other in others:
            same = have_same_bits([(first[number], other[number]) for number in equal])
            equal = [number for number, is_same in zip(equal, same, strict=True) if is_same]
        hashes = [
            self._hash_result(slot, first[number], number in equal, is_alone)
            for number, slot in enumerate(self.slots)
        ]
        return BufferReport(hashes, last=max(self._results))

    def describe_refusal(self, report: BufferReport) -> tuple[bool, str]:
        """Return why the results for a buffer here cannot be merged; "" if they can.

        Returns:
            Whether the reason is certain, and the reason. It is not if the results of another rank
            are not as expected.
        """
        pairs = zip(self.slots, report.hashes, strict=False)
        refused = [slot for slot, mark in pairs if mark == REFUSED]
        slot = next((slot for slot in refused if slot.problem), next(iter(refused), None))
        return (False, "") if slot is None else (bool(slot.problem), slot.describe_refusal())

    @torch.no_grad()
    def merge(
        self,
        report: BufferReport,
        nodes_by_rank: Sequence[Sequence[Node]],
        leaves: int,
        exchange: BufferExchange | None = None,
    ) -> None:
        """Write the merged results of the step into the restored buffers.

        Args:
            report: The merged report of all replicas.
            nodes_by_rank: The nodes of the tree that each rank holds, as for the gradients.
            leaves: The number of micro-batches.
            exchange: The exchange with other ranks; None if there are none.

        Raises:
            BufferMismatchError: The results for a buffer cannot be merged.
        """
        if report.is_refused:
            raise BufferMismatchError(self.describe_refusal(report)[1])
        marks = report.hashes
        added = [n for n, mark in enumerate(marks) if mark in (DIVERGED, SUM)]
        last = [n for n, mark in enumerate(marks) if mark == LAST]
        equal = [n for n, mark in enumerate(marks) if mark and mark not in (DIVERGED, SUM, LAST)]
        self._copy_results(equal, next(iter(self._results), -1))
        self._copy_results(last, report.last)
        if exchange is not None and equal and not report.is_everyone:
            # A rank without micro-batches receives the results from one that has some.
            exchange.broadcast([self.slots[number].tensor for number in equal], report.source)
        if exchange is not None and last:
            ranks = [any(lo <= report.last < hi for lo, hi in nodes) for nodes in nodes_by_rank]
            exchange.broadcast([self.slots[number].tensor for number in last], ranks.index(True))
        if not added:
            return
        starts = [_widen(self.slots[number].tensor) for number in added]
        sums: TreeAccumulator[TensorList] = TreeAccumulator(leaves, _add_lists)
        for lo, hi in nodes_by_rank[0 if exchange is None else exchange.rank]:
            for microbatch in range(lo, hi):
                terms = [
                    self._get_term(microbatch, number, start if marks[number] == SUM else None)
                    for number, start in zip(added, starts, strict=True)
                ]
                sums.put((microbatch, microbatch + 1), terms)
        if exchange is None:
            (values,) = sums.nodes.values()
        else:
            values = exchange.add(sums.nodes, starts, nodes_by_rank, leaves)
        for number, start, value in zip(added, starts, values, strict=True):
            assert value is not None
            value = value.view(start.shape)
            self.slots[number].tensor.copy_(start + value if marks[number] == SUM else value)

    def _copy_results(self, numbers: Sequence[int], microbatch: int) -> None:
        """Write the results of a micro-batch into some buffers, if this rank computed it."""
        for number in numbers if microbatch in self._results else ():
            self.slots[number].tensor.copy_(self._results[microbatch][number])

    def _get_term(
        self, microbatch: int, number: int, start: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return a micro-batch's term in a buffer's mean, or in its sum if `start` is given."""
        if microbatch not in self._results:
            return None  # its weight is 0
        result = _widen(self._results[microbatch][number]).contiguous()
        return result * self._shares[microbatch] if start is None else result - start

    def _read_result(self, slot: BufferSlot) -> torch.Tensor:
        """Return a buffer after a micro-batch; the slot's own tensor if its shape has changed."""
        module, name = slot.registrations[0]
        result = module._buffers[name]
        if result is not None and result.shape == slot.tensor.shape:
            return result
        now = "None" if result is None else f"{tuple(result.shape)}"
        slot.problem = (
            f"buffer {slot.name} changed its shape in a training step: buffers must keep "
            f"their shape, here {tuple(slot.tensor.shape)}, which became {now}; keep what has "
            "another size in every micro-batch in an attribute, or let it have its largest size"
        )
        return slot.tensor

    def _keep(self, slot: BufferSlot, result: torch.Tensor, is_unchanged: bool) -> torch.Tensor:
        """Return the tensor to keep for a micro-batch: the slot's own one if nothing was written.

        The copy is then reused for the next micro-batch.
        """
        if is_unchanged:
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
        self, slot: BufferSlot, first: torch.Tensor, is_equal: bool, is_alone: bool
    ) -> BufferHash:
        """Return the hash of a buffer's results, of which `first` is the first one."""
        if slot.problem:
            return REFUSED
        if is_equal and first is slot.tensor:
            return UNCHANGED
        rule = slot.find_rule()
        if rule is None:
            return REFUSED
        if rule in MARKS:
            return MARKS[rule]
        if not is_equal:
            return DIVERGED if rule == "mean" else REFUSED
        data = b"" if is_alone else as_bytes(first.cpu().contiguous()).numpy().data
        mark = hashlib.blake2b(data, digest_size=8).hexdigest()
        return mark if rule == "mean" else EQUAL + mark


def _add_lists(left: TensorList, right: TensorList) -> TensorList:
    """Add two lists of tensors entry by entry; None is absent and does not count as zero."""
    return [
        two if one is None else one if two is None else one + two
        for one, two in zip(left, right, strict=True)
    ]


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype in which its results are added."""
    if not tensor.is_floating_point():
        return tensor.to(torch.int64)
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a vector of bytes."""
    # Torch calls a single element with any stride contiguous, and then cannot view its bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
