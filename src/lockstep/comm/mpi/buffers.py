"""The tensors of one call as memory that MPI reads and writes.

A contiguous tensor is passed as it is. A copy takes its place if it has gaps or another order of
elements, and where tensors of one call share memory: every input counts with the values that it had
before the call, and if outputs overlap, the last of them wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Buffers", "find_overlaps"]

Extent = tuple[int, int]  # first byte, and the byte after the last one


class Buffers:
    """The memory of a call.

    Args:
        inputs: The tensors that are read.
        outputs: The tensors that are written.
        in_place: Whether the outputs are read too.

    Attributes:
        sources: Contiguous tensors with the values of the inputs.
        targets: Contiguous tensors for the outputs; `copy_back` writes them to the outputs.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        in_place: bool = False,
    ) -> None:
        shared_inputs, shared_outputs = find_overlaps(
            [extent(tensor) for tensor in inputs], [extent(tensor) for tensor in outputs]
        )
        self.sources = [
            tensor.clone(memory_format=torch.contiguous_format)
            if number in shared_inputs
            else _plain(tensor)
            for number, tensor in enumerate(inputs)
        ]
        self.targets: list[torch.Tensor] = []
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, tensor in enumerate(outputs):
            if number not in shared_outputs and _is_plain(tensor):
                self.targets.append(tensor)
                continue
            target = torch.empty(tensor.shape, dtype=tensor.dtype)
            if in_place:
                target.copy_(tensor)
            self.targets.append(target)
            self._copied.append((tensor, target))

    def copy_back(self) -> None:
        """Write the copies to their outputs, in the order of the outputs."""
        for tensor, target in self._copied:
            tensor.copy_(target)


def extent(tensor: torch.Tensor) -> Extent:
    """Return the range of addresses between the first and the last element."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return start, start + (last + 1) * tensor.element_size()


def find_overlaps(
    inputs: Sequence[Extent], outputs: Sequence[Extent]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the inputs that overlap an output, and the outputs that overlap another output."""
    if len(outputs) == 1 and len(inputs) <= 1:
        (start, stop), *_ = outputs
        is_shared = [max(a, start) < min(b, stop) for a, b in inputs]
        return frozenset(n for n, shared in enumerate(is_shared) if shared), frozenset()
    # Sorted by their starts, what overlaps an earlier range starts before the furthest stop.
    all_ranges = [(start, stop, True, n) for n, (start, stop) in enumerate(outputs)]
    all_ranges += [(start, stop, False, n) for n, (start, stop) in enumerate(inputs)]
    clusters: list[tuple[int, list[tuple[int, int, bool, int]]]] = []
    for part in sorted(part for part in all_ranges if part[0] < part[1]):
        if clusters and part[0] < clusters[-1][0]:
            furthest, members = clusters.pop()
            clusters.append((max(furthest, part[1]), [*members, part]))
        else:
            clusters.append((part[1], [part]))
    shared_inputs, shared_outputs = set[int](), set[int]()
    for _, members in clusters:
        written = [part for part in members if part[2]]
        for start, stop, is_output, number in members:
            if any(
                start < other[1] and other[0] < stop
                for other in written
                if not is_output or other[3] != number
            ):
                (shared_outputs if is_output else shared_inputs).add(number)
    return frozenset(shared_inputs), frozenset(shared_outputs)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if _is_plain(tensor):
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()
