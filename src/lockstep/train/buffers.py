"""Buffers: what micro-batches write besides gradients (batch-norm statistics).

    step's buffers ──clone──> micro-batch 0 ──> result 0 ┐ all the same bits: adopted
                   ──clone──> micro-batch 1 ──> result 1 ┤ floating, different: tree mean,
                   ──clone──> micro-batch 2 ──> result 2 ┘   weighted by samples
                                                           other, different: an error

Every micro-batch starts from the step's buffers, so that what it computes does
not depend on who computed the one before. This differs on purpose from
DistributedDataParallel, which gives everybody the buffers of rank 0. The mean
is added in float32 (float64 stays float64) and rounded once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.bucket import plan
from lockstep.comm.exact import ExactSum, add_lists, exact_sums
from lockstep.comm.transfer import as_bytes, broadcast_tensors
from lockstep.comm.tree import Fold, Node
from lockstep.errors import BufferError

__all__ = ["Buffers", "Finding"]

Finding = str
"""What one rank reports of one buffer: the hash of its results, or `DIFFER`."""

DIFFER = "differ"

BUCKET_BYTES = 4 << 20


@dataclass
class _Slot:
    """One buffer: its tensor, and the places of the model where it is registered."""

    name: str
    tensor: torch.Tensor
    places: list[tuple[nn.Module, str]]


def _slots(model: nn.Module) -> list[_Slot]:
    found: dict[int, _Slot] = {}
    for prefix, module in model.named_modules():
        for name, tensor in module._buffers.items():
            if tensor is None:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            slot = found.setdefault(id(tensor), _Slot(full_name, tensor, []))
            slot.places.append((module, name))
    return list(found.values())


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(as_bytes(left.contiguous()), as_bytes(right.contiguous()))


class Buffers:
    """The buffers of one model during one step."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = _slots(model)
        self._results: dict[int, list[torch.Tensor]] = {}
        self._shares: dict[int, float] = {}

    def enter(self) -> None:
        """Put a fresh copy of the step's buffers into the model."""
        for slot in self._slots:
            copy = slot.tensor.detach().clone()
            for module, name in slot.places:
                module._buffers[name] = copy

    def leave(self, microbatch: int, share: float) -> None:
        """Take the buffers as `microbatch` left them; `share` is its part of the samples."""
        self._results[microbatch] = list(self._current())
        self._shares[microbatch] = share

    def restore(self) -> None:
        """Put the step's buffers back as they were when it began."""
        for slot in self._slots:
            for module, name in slot.places:
                module._buffers[name] = slot.tensor

    def findings(self, alone: bool = False) -> list[Finding]:
        """Return for every buffer the hash of this rank's results; nothing if it has none.

        `alone` there is nobody to compare with, and the hashes are not computed.
        """
        if not self._results:
            return []
        first, *others = self._results.values()
        return [
            DIFFER
            if not all(_same_bits(result, other[number]) for other in others)
            else ""
            if alone
            else _hash(result)
            for number, result in enumerate(first)
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
        `BufferError` for a buffer whose results differ and have no mean.
        """
        reports = [report for report in findings if report]
        differing = [
            number
            for number, row in enumerate(zip(*reports, strict=True))
            if DIFFER in row or len(set(row)) > 1
        ]
        for number in differing:
            self._require_mean(self._slots[number])
        adopted = set(range(len(self._slots))) - set(differing)
        if self._results:
            first = next(iter(self._results.values()))
            for number in adopted:
                if not _same_bits(self._slots[number].tensor, first[number]):
                    self._slots[number].tensor.copy_(first[number])
        if len(reports) < len(findings):
            # Some rank computed nothing of a short batch; rank 0 always holds the first leaf.
            broadcast_tensors([self._slots[number].tensor for number in sorted(adopted)], group)
        for number, mean in self._means(differing, holders, leaves, group):
            self._slots[number].tensor.copy_(mean)

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
        for leaf in sorted(self._results):
            terms: list[torch.Tensor | None] = [
                self._results[leaf][number].to(dtype).contiguous() * self._shares[leaf]
                for number, dtype in zip(differing, dtypes, strict=True)
            ]
            fold.put((leaf, leaf + 1), terms)
        if len(holders) == 1:
            (sums,) = fold.nodes.values()
            pairs = list(enumerate(sums))
        else:
            buckets = plan([tensor.numel() for tensor in slots], dtypes, BUCKET_BYTES)
            device = slots[0].device
            pairs = exact_sums(
                [ExactSum(bucket, holders, leaves, device, group) for bucket in buckets], fold.nodes
            )
        for index, mean in pairs:
            assert mean is not None
            yield differing[index], mean.view(slots[index].shape)

    def _require_mean(self, slot: _Slot) -> None:
        if not slot.tensor.is_floating_point():
            raise BufferError(
                f"buffer {slot.name} ({slot.tensor.dtype}) got different values in different "
                "micro-batches, and integers have no mean: let it be floating, or write it "
                "outside of the training step"
            )

    def _current(self) -> Iterator[torch.Tensor]:
        for slot in self._slots:
            module, name = slot.places[0]
            result = module._buffers[name]
            if result is None or result.shape != slot.tensor.shape:
                raise BufferError(
                    f"buffer {slot.name} changed its shape in a training step: buffers must keep "
                    f"their shape {tuple(slot.tensor.shape)}"
                )
            yield result.detach()


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _hash(tensor: torch.Tensor) -> str:
    data = as_bytes(tensor.cpu().contiguous()).numpy().data
    return hashlib.blake2b(data, digest_size=8).hexdigest()
