"""The cut: a batch in M micro-batches, the micro-batches over the replicas.

    batch of B = 11 samples, M = 4      0 1 2 | 3 4 5 | 6 7 8 | 9 10
    three replicas                      replica 0     | replica 1 | replica 2
                                        m = 0, 1      | m = 2     | m = 3

Both cuts follow one rule: contiguous, sizes that differ by at most one, the
larger first. A batch of fewer than M samples has fewer micro-batches, never an
empty one. Nothing here knows of processes; plain values in, plain values out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy
import torch

from lockstep.data.identity import Identity
from lockstep.errors import DatasetError

__all__ = [
    "Batch",
    "Microbatch",
    "aligned",
    "copied",
    "cut",
    "leaves",
    "mapped",
    "owned",
    "pieces",
    "spans",
]

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


def spans(total: int, parts: int) -> list[range]:
    """Cut `range(total)` into `parts` contiguous ranges, the larger first.

    Sizes differ by at most one; with `total < parts` the last ranges are empty.
    """
    if total < 0 or parts < 1:
        raise ValueError(f"cannot cut {total} things into {parts} parts")
    small, larger = divmod(total, parts)
    starts = [part * small + min(part, larger) for part in range(parts + 1)]
    return [range(lo, hi) for lo, hi in pairwise(starts)]


def leaves(samples: int, microbatches: int) -> int:
    """Return how many micro-batches of a batch hold a sample: the leaves of its tree."""
    return min(samples, microbatches)


def owned(samples: int, microbatches: int, replicas: int, replica: int) -> range:
    """Return the micro-batches of a batch of `samples` that `replica` computes."""
    return spans(leaves(samples, microbatches), replicas)[replica]


@lru_cache(maxsize=256)
def pieces(
    samples: int, microbatches: int, replicas: int, replica: int
) -> tuple[tuple[int, range], ...]:
    """Return (index, positions in the batch) of each micro-batch that `replica` computes."""
    if samples == 0:
        return ()
    cuts = spans(samples, leaves(samples, microbatches))
    return tuple((index, cuts[index]) for index in owned(samples, microbatches, replicas, replica))


@dataclass(frozen=True)
class Microbatch:
    """One micro-batch: leaf `index` of the batch's tree, with `size` samples."""

    index: int
    size: int
    data: Any


@dataclass(frozen=True)
class Batch:
    """A global batch of `size` samples as one rank sees it.

    `microbatches` holds those that this rank's replica computes, in ascending
    order; `leaves` counts all of the batch. `seconds` is how long this rank
    waited for its data. `identity` tells the batch from all others, on every rank alike.
    """

    size: int
    leaves: int
    microbatches: tuple[Microbatch, ...]
    epoch: int = 0
    seconds: float = 0.0
    identity: Identity = field(default_factory=Identity)


def cut(batch: Any, microbatches: int, replicas: int, replica: int, epoch: int = 0) -> Batch:
    """Cut a whole global batch into the micro-batches of `replica`.

    `batch` is a tensor, or tuples, lists and mappings of tensors and of plain
    lists (one entry a sample), all with one common first dimension. Scalars and
    tensors without a dimension go to every micro-batch. Each micro-batch has its
    own memory: what a model writes into its input changes nobody else's.

    Raises DatasetError where first dimensions differ, where nothing has one, or
    where it is 0.
    """
    sizes: dict[str, int] = {}
    _measure(batch, "batch", sizes)
    if not sizes:
        raise DatasetError(
            f"a batch of type {type(batch).__name__} cannot be cut into micro-batches; "
            "give tensors, or tuples, lists or mappings of tensors"
        )
    (first, size), *others = sizes.items()
    for name, other in others:
        if other != size:
            raise DatasetError(f"{first} holds {size} samples, but {name} holds {other}")
    if size == 0:
        raise DatasetError("the batch is empty: it holds no sample")
    return Batch(
        size=size,
        leaves=leaves(size, microbatches),
        microbatches=tuple(
            Microbatch(index, len(span), copied(_sliced(batch, span)))
            for index, span in pieces(size, microbatches, replicas, replica)
        ),
        epoch=epoch,
    )


def mapped(
    visit: Callable[[Any], Any], data: Any, kinds: tuple[type, ...] = (torch.Tensor,)
) -> Any:
    """Apply `visit` to every tensor in nested tuples, lists and mappings; keep the rest.

    With `kinds`, to every object of these kinds instead.
    """
    if isinstance(data, kinds):
        return visit(data)
    if isinstance(data, (tuple, list, Mapping)) and not _is_column(data):
        return _rebuilt(data, lambda part: mapped(visit, part, kinds))
    return data


def copied(data: Any) -> Any:
    """Return `data` with every tensor and array in memory of its own.

    What a model writes into its input then reaches neither the dataset nor another
    micro-batch. A tensor that is there twice is one tensor in the copy, too.
    """
    copies: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if id(value) not in copies:
            is_tensor = isinstance(value, torch.Tensor)
            copies[id(value)] = value.clone() if is_tensor else value.copy()
        return copies[id(value)]

    return mapped(copy, data, (torch.Tensor, numpy.ndarray))


def aligned(data: Any) -> Any:
    """Return `data` with every tensor starting on a 64-byte boundary, dense in memory.

    Kernels choose their path by alignment and strides, so the bits of a result
    could depend on where its input happens to lie: a view into a larger batch on
    one rank, a tensor of its own on another. Tensors that lie well are not copied.
    """
    return mapped(_aligned, data)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    if tensor.data_ptr() % ALIGNMENT == 0 and _dense(tensor):
        return tensor
    return tensor.clone()


def _dense(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _is_column(data: Any) -> bool:
    """Does `data` hold one entry a sample: a tensor, an array, a list of plain values?"""
    if isinstance(data, torch.Tensor):
        return data.dim() > 0
    if hasattr(data, "shape"):  # a numpy array
        return len(data.shape) > 0
    return isinstance(data, (list, tuple)) and not any(
        isinstance(part, (torch.Tensor, list, tuple, Mapping)) or hasattr(part, "shape")
        for part in data
    )


def _measure(data: Any, name: str, sizes: dict[str, int]) -> None:
    """Note the first dimension of every column below `data`, by the name a user would write."""
    if _is_column(data):
        sizes[name] = len(data)
    elif isinstance(data, Mapping):
        for entry, part in data.items():
            _measure(part, f"{name}[{entry!r}]", sizes)
    elif isinstance(data, (tuple, list)):
        for position, part in enumerate(data):
            _measure(part, f"{name}[{position}]", sizes)


def _sliced(data: Any, span: range) -> Any:
    if _is_column(data):
        return data[span.start : span.stop]
    if isinstance(data, (tuple, list, Mapping)):
        return _rebuilt(data, lambda part: _sliced(part, span))
    return data


def _rebuilt(data: Any, visit: Callable[[Any], Any]) -> Any:
    """Return a container like `data` of what `visit` makes of its parts."""
    if isinstance(data, Mapping):
        parts = {entry: visit(part) for entry, part in data.items()}
        return parts if type(data) is dict else _like(data, parts)
    visited = [visit(part) for part in data]
    if hasattr(data, "_fields"):  # a named tuple takes its parts one by one
        return type(data)(*visited)
    return visited if type(data) is list else type(data)(visited)


def _like(data: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    try:
        return type(data)(parts)  # type: ignore[call-arg]
    except TypeError:  # a mapping that is not made from a mapping, such as defaultdict
        return parts
