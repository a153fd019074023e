"""Batches and micro-batches as data: cut, copied, aligned and joined.

`lockstep.kernel.splitting` decides which samples are a micro-batch, and `lockstep.data.assignment`
which replica computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep.data.assignment import ReplicaShare
from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.errors import DatasetError, UsageError
from lockstep.kernel.splitting import split_evenly

__all__ = [
    "Batch",
    "Microbatch",
    "align_tensors",
    "clone_tensors",
    "halve_samples",
    "join_batches",
    "join_samples",
    "map_tensors",
    "split_batch",
]

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


def split_batch(batch: Any, share: ReplicaShare) -> Batch:
    """Split a whole global batch into the micro-batches of a replica.

    Each micro-batch has its own memory, so a model may write into its input.

    Args:
        batch: A tensor, or nested tuples, lists and mappings of tensors and of plain lists (one
            entry per sample), all with the same first dimension. Scalars and 0-dimensional tensors
            are copied to every micro-batch.
        share: The share whose micro-batches are returned.

    Raises:
        DatasetError: The first dimensions differ, are 0, or do not exist.
    """
    if (size := _count_rows(batch)) is not None:  # the usual case, in a third of the time
        cuts = _find_cuts(share, size)
        parts = zip(*[_copied_parts(tensor, cuts) for tensor in batch], strict=True)
        return _make_batch(size, share, cuts, map(type(batch), parts))
    sizes: dict[str, int] = {}
    uncut: dict[str, int] = {}
    _collect_sizes(batch, "batch", sizes, uncut)
    if not sizes:
        raise DatasetError(
            f"a batch of type {type(batch).__name__} cannot be split into micro-batches; "
            "pass tensors, or tuples, lists or mappings of tensors"
            + "; for several batches write `for batch in trainer.batches(...): trainer.step(batch)`"
            * (hasattr(batch, "__iter__") or hasattr(batch, "__getitem__"))
        )
    (first, size), *others = sizes.items()
    for name, other in others:
        if other != size:
            raise DatasetError(f"{first} has {size} samples, but {name} has {other}")
    if size == 0:
        raise DatasetError("the batch has no samples")
    if (whole := next((name for name, rows in uncut.items() if rows == size), None)) is not None:
        raise DatasetError(
            f"{whole} has {size} rows, as many as the batch has samples, but only tuples, lists "
            "and mappings are split into micro-batches: pass its tensors in one of these, or load "
            "them with batches(dataset, collate_fn=...)"
        )
    cuts = _find_cuts(share, size)
    return _make_batch(size, share, cuts, _cut(batch, cuts, {}))


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Return the batch whose micro-batch m is the tuple of those of several batches.

    Its samples, and their number, are those of the first one.

    Raises:
        UsageError: The batches have different numbers of micro-batches.
    """
    first = batches[0]
    leaves = [batch.leaves for batch in batches]
    if len({*leaves}) > 1:
        raise UsageError(
            f"the batches of a step have {leaves} micro-batches, because a batch of few samples "
            "has one per sample: pass drop_last=True to batches(...), or let every batch have "
            "as many samples as there are microbatches"
        )
    microbatches = tuple(
        replace(parts[0], data=tuple(part.data for part in parts))
        for parts in zip(*(batch.microbatches for batch in batches), strict=True)
    )
    rest = "+".join(batch.identity.pack().replace(" ", ":") for batch in batches[1:])
    identity = first.identity
    if first.identity.order:
        identity = replace(identity, order=f"{identity.order}+{rest}")
    else:
        identity = replace(identity, checksum=f"{identity.checksum}+{rest}")
    return replace(first, microbatches=microbatches, identity=identity, load=None)


def _count_rows(batch: Any) -> int | None:
    """Return the samples of a tuple or list of different tensors with as many rows each.

    Returns:
        None for any other batch.
    """
    if type(batch) not in (tuple, list) or {*map(type, batch)} != {torch.Tensor}:
        return None
    shapes = {tensor.shape[:1] for tensor in batch}
    if len(shapes) > 1 or len({*map(id, batch)}) < len(batch):
        return None
    return sum(shapes.pop()) or None  # no samples, or tensors without rows


class _Cuts(NamedTuple):
    """How a batch is cut.

    Attributes:
        indices: The indices of the micro-batches.
        spans: Their samples.
        sizes: The number of samples of each.
        unit: The greatest common divisor of all sizes but the last; -1 for a cut elsewhere.
    """

    indices: Sequence[int]
    spans: Sequence[range]
    sizes: list[int]
    unit: int


def _make_cuts(pieces: Iterable[tuple[int, range]]) -> _Cuts:
    indices, spans = [*zip(*pieces, strict=True)] or [(), ()]
    sizes = [*map(len, spans)]
    are_adjacent = spans and spans[-1].stop - spans[0].start == sum(sizes)
    return _Cuts(indices, spans, sizes, math.gcd(*sizes[:-1]) if are_adjacent else -1)


@lru_cache(maxsize=64)
def _find_cuts(share: ReplicaShare, size: int) -> _Cuts:
    return _make_cuts(share.pieces(size))


def _make_batch(size: int, share: ReplicaShare, cuts: _Cuts, parts: Iterable[Any]) -> Batch:
    """Return the batch of `size` samples whose micro-batches hold `parts`."""
    microbatches = tuple(map(Microbatch, cuts.indices, cuts.sizes, parts))
    return Batch(size, min(size, share.microbatches), microbatches)


def halve_samples(data: Any, size: int) -> Sequence[Any]:
    """Return copies of the halves of some samples, the larger one first.

    A list of `size` mappings, or of tensors with other numbers of rows, has one entry per sample,
    such as the boxes of each image.

    Raises:
        DatasetError: Something in `data` has not one row per sample.
    """
    data = _mark_entries(data, size)
    sizes = dict[str, int]()
    uncut: dict[str, int] = {}
    _collect_sizes(data, "data", sizes, uncut)
    if {*sizes.values()} != {size} or uncut:
        raise DatasetError(f"the data are not {size} rows")
    return _cut(data, _make_cuts(enumerate(split_evenly(size, 2))), {})


class _Entries(list[Any]):
    """A list of objects, one per sample."""


def _mark_entries(data: Any, size: int) -> Any:
    """Return `data` with `_Entries` for each list of one mapping or varying tensor per sample."""
    if isinstance(data, list) and len(data) == size:
        tensors = [part for part in data if isinstance(part, torch.Tensor)]
        is_varying = len(tensors) == size and any(
            len(part) != size for part in tensors if part.dim()
        )
        if is_varying or all(isinstance(part, Mapping) for part in data):
            return _Entries(data)
    if isinstance(data, (Mapping, tuple, list)):
        return _rebuilt(data, lambda part: _mark_entries(part, size))
    return data


def join_samples(*parts: Any) -> Any:
    """Return the samples of micro-batches as one; ValueError if they do not fit together."""
    one = parts[0]
    if isinstance(one, torch.Tensor) and one.dim():
        return torch.cat(parts)
    if _is_column(one):
        if not isinstance(one, (list, tuple)):
            return numpy.concatenate(parts)
        return [sample for part in parts for sample in part]
    if isinstance(one, Mapping):
        joined = {key: join_samples(*(part[key] for part in parts)) for key in one}
        return _assembled(one, joined)
    if isinstance(one, list) and one and all(isinstance(entry, Mapping) for entry in one):
        return [sample for part in parts for sample in part]
    if isinstance(one, (tuple, list)):
        return _assembled(one, [join_samples(*entries) for entries in zip(*parts, strict=True)])
    if not all(bool(one == part) for part in parts):
        raise ValueError("the micro-batches have different values")
    return one


def map_tensors(
    visit: Callable[[Any], Any], data: Any, kinds: tuple[type, ...] = (torch.Tensor,)
) -> Any:
    """Replace every tensor in nested tuples, lists and mappings by the result of `visit`.

    Args:
        visit: A function of a tensor that returns its replacement.
        data: The nested data.
        kinds: The types to which `visit` is applied.
    """
    if isinstance(data, kinds):
        return visit(data)
    if isinstance(data, (tuple, list, Mapping)) and not _is_column(data):
        return _rebuilt(data, lambda part: map_tensors(visit, part, kinds))
    return data


def clone_tensors(data: Any) -> Any:
    """Return `data` with a copy of every tensor and array.

    Writes into the copy affect neither the dataset nor another micro-batch. A tensor that occurs
    twice is a single tensor in the copy, too.
    """
    copies: dict[int, Any] = {}

    def clone(value: Any) -> Any:
        if id(value) not in copies:
            copies[id(value)] = _copied(value)
        return copies[id(value)]

    return map_tensors(clone, data, (torch.Tensor, numpy.ndarray))


def _copied(value: torch.Tensor | numpy.ndarray[Any, Any]) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def align_tensors(data: Any) -> Any:
    """Return `data` with every tensor dense and aligned to 64 bytes.

    Kernels select their code path by alignment and strides, so the bits of a result could
    otherwise depend on whether its input is a view into a larger batch or a separate tensor.
    Tensors that are already dense and aligned are not copied.
    """
    if isinstance(data, (tuple, list)) and all(
        type(part) is torch.Tensor and _aligned(part) is part for part in data
    ):
        return data  # the usual case, in a tenth of the time
    return map_tensors(_aligned, data)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # within vmap or grad
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
    """Return whether `data` has one entry per sample: a tensor, array or list of values."""
    if isinstance(data, torch.Tensor):
        return data.dim() > 0
    if isinstance(data, _Entries):
        return True
    if hasattr(data, "shape"):  # a numpy array
        return len(data.shape) > 0
    return isinstance(data, (list, tuple)) and not any(
        isinstance(part, (torch.Tensor, list, tuple, Mapping)) or hasattr(part, "shape")
        for part in data
    )


def _collect_sizes(data: Any, name: str, sizes: dict[str, int], uncut: dict[str, int]) -> None:
    """Collect the first dimension of every column in `data`, by the expression for the column.

    Args:
        data: Nested data.
        name: The expression for it.
        sizes: The first dimensions of what is split.
        uncut: Those of tensors in other objects, which every micro-batch gets as they are.
    """
    if isinstance(data, PackedSequence):
        raise DatasetError(
            f"{name} is a PackedSequence, whose samples are mixed in memory, so it cannot be split "
            "into micro-batches: pass padded sequences and their lengths, which the model packs, "
            "or load it with batches(dataset, collate_fn=...), which packs each micro-batch"
        )
    if _is_column(data):
        sizes[name] = len(data)
    elif isinstance(data, Mapping):
        for entry, part in data.items():
            _collect_sizes(part, f"{name}[{entry!r}]", sizes, uncut)
    elif isinstance(data, (tuple, list)):
        for position, part in enumerate(data):
            _collect_sizes(part, f"{name}[{position}]", sizes, uncut)
    else:
        for attribute, value in getattr(data, "__dict__", {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                uncut[f"{name}.{attribute}"] = len(value)


def _cut(data: Any, cuts: _Cuts, copies: dict[int, tuple[Any, Sequence[Any]]]) -> Sequence[Any]:
    """Return copies of the parts of `data`; a tensor that occurs twice is one tensor in each copy.

    Args:
        data: The nested data; each column is split.
        cuts: The samples of each part.
        copies: The tensors and arrays that have been split so far, with their parts, by id.
    """
    if isinstance(data, (torch.Tensor, numpy.ndarray)):
        if id(data) not in copies:
            copies[id(data)] = data, _copied_parts(data, cuts)
        return copies[id(data)][1]
    if _is_column(data):
        return [data[span.start : span.stop] for span in cuts.spans]
    if isinstance(data, Mapping):
        columns = {entry: _cut(part, cuts, copies) for entry, part in data.items()}
        return [
            _assembled(data, {entry: column[n] for entry, column in columns.items()})
            for n in range(len(cuts.spans))
        ]
    if isinstance(data, (tuple, list)):
        lists = [_cut(part, cuts, copies) for part in data]
        return [_assembled(data, [column[n] for column in lists]) for n in range(len(cuts.spans))]
    return [data for _ in cuts.spans]


def _copied_parts(data: torch.Tensor | numpy.ndarray[Any, Any], cuts: _Cuts) -> Sequence[Any]:
    """Return a copy of each part of a column; copies of a value without a first dimension."""
    if not data.ndim:
        return [_copied(data) for _ in cuts.spans]
    if type(data) is torch.Tensor and cuts.unit >= 0 and data.is_contiguous():
        parts = None if data.requires_grad else _copied_together(data, cuts)
        if parts is not None:
            return parts
    return [_copied(data[span.start : span.stop]) for span in cuts.spans]


def _copied_together(data: torch.Tensor, cuts: _Cuts) -> Sequence[torch.Tensor] | None:
    """Return parts of one copy of a tensor, which are as dense and aligned as copies of the parts.

    They are no views for autograd: each has a version of its own.

    Returns:
        None if the parts would not be aligned.
    """
    parts: Sequence[torch.Tensor]
    first = cuts.spans[0].start
    last = cuts.spans[-1].stop
    whole = data if last - first == data.shape[0] else data[first:last]
    row = data.stride(0) * data.element_size()
    if cuts.unit * row % ALIGNMENT == 0:
        parts = torch.unsafe_split_with_sizes(whole.clone(), cuts.sizes)
        return parts
    if {*cuts.sizes} != {cuts.unit} or row == 0 or ALIGNMENT % row:
        return None
    count = len(cuts.sizes)
    rest = data.shape[1:]
    gap = -cuts.unit % (ALIGNMENT // row)
    spaced = whole.new_empty((count, cuts.unit + gap, *rest))
    spaced[:, : cuts.unit] = whole.view(count, cuts.unit, *rest)
    sizes = [cuts.unit, gap] * count
    parts = torch.unsafe_split_with_sizes(spaced.flatten(0, 1), sizes)[::2]
    return parts


def _rebuilt(data: Any, visit: Callable[[Any], Any]) -> Any:
    """Return a container of the type of `data` with `visit` applied to its parts."""
    if isinstance(data, Mapping):
        return _assembled(data, {entry: visit(part) for entry, part in data.items()})
    return _assembled(data, [visit(part) for part in data])


def _assembled(data: Any, parts: Any) -> Any:
    """Return a container of the type of `data` made of `parts`, a dict or a list.

    A container of a type of its own is rebuilt as torch's loader does it.
    """
    if isinstance(data, Mapping):
        return parts if type(data) is dict else _like(data, parts)
    if hasattr(data, "_make"):  # a named tuple, whose constructor may have other arguments
        return data._make(parts)
    return parts if type(data) is list else type(data)(parts)


def _like(data: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    if isinstance(data, MutableMapping):
        with suppress(Exception):  # some do not permit it
            clone = copy(data)
            clone.update(parts)
            return clone
    try:
        return type(data)(parts)  # type: ignore[call-arg]
    except TypeError:  # the constructor does not accept a mapping
        return parts
