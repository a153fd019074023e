"""Buckets: tensors that are reduced in one message, with their offsets.

    bucket   | w0 ......... | b0 | w1 ................ |pad|     offsets and the ends of slices
    slices   |   rank 0     |   rank 1    |   rank 2       |     are multiples of 64 bytes

Each rank adds one slice for all ranks. A tensor that crosses the end of a slice consists of
several *pieces*. A plan depends only on sizes and dtypes, so every rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "ALIGNMENT",
    "Bucket",
    "BucketSegment",
    "Member",
    "cut_bucket",
    "parts",
    "pieces",
    "plan",
    "round_up",
    "slice_length",
]

ALIGNMENT = 64
"""The alignment of all offsets, in bytes. Kernels select their code path by alignment, and may
round the elements after the last whole vector differently from those before."""


@dataclass(frozen=True)
class Member:
    """Tensor number `index`, `numel` elements from element `offset` of its bucket."""

    index: int
    numel: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that are reduced together; `length` is in elements."""

    dtype: torch.dtype
    members: tuple[Member, ...]
    length: int


@dataclass(frozen=True)
class BucketSegment:
    """Elements [start, stop) of member number `member`, at element `offset` of slice `slice`."""

    member: int
    start: int
    stop: int
    slice: int
    offset: int


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple that is not less than the value."""
    return -(-value // multiple) * multiple


def plan(
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    capacity: int,
    indices: Sequence[int] | None = None,
    overflow: int = 0,
) -> list[Bucket]:
    """Pack tensors into buckets, the last tensor first.

    Gradients become ready roughly in the reverse order of the parameters, so the first bucket is
    complete first. A tensor larger than `capacity` has its own bucket.

    Args:
        numels: The number of elements of each tensor.
        dtypes: The dtype of each tensor.
        capacity: The maximum size of a bucket in bytes.
        indices: The numbers of the tensors; None for 0, 1, 2, ...
        overflow: The size in bytes up to which a bucket is too small to be exchanged alone: the
            next tensor joins it even if both exceed `capacity`, as a weight joins its bias.
    """
    numbers = range(len(numels)) if indices is None else indices
    buckets: list[Bucket] = []
    open_members: dict[torch.dtype, list[Member]] = {}
    lengths: dict[torch.dtype, int] = {}

    def close(dtype: torch.dtype) -> None:
        buckets.append(Bucket(dtype, tuple(open_members.pop(dtype)), lengths.pop(dtype)))

    for index in reversed(range(len(numels))):
        dtype = dtypes[index]
        room = round_up(numels[index], ALIGNMENT // dtype.itemsize)
        offset = lengths.get(dtype, 0)
        is_full = (offset + room) * dtype.itemsize > capacity
        if offset * dtype.itemsize > overflow and is_full:
            close(dtype)
            offset = 0
        open_members.setdefault(dtype, []).append(Member(numbers[index], numels[index], offset))
        lengths[dtype] = offset + room
    for dtype in list(open_members):
        close(dtype)
    return buckets


def slice_length(bucket: Bucket, ranks: int) -> int:
    """Return the number of elements of a slice for a number of ranks."""
    return round_up(-(-bucket.length // ranks), ALIGNMENT // bucket.dtype.itemsize)


def pieces(bucket: Bucket, ranks: int) -> list[BucketSegment]:
    """Split every member at the ends of the slices; empty tensors have no piece."""
    length = slice_length(bucket, ranks)
    segments: list[BucketSegment] = []
    for number, member in enumerate(bucket.members):
        start = 0
        while start < member.numel:
            slice_, offset = divmod(member.offset + start, length)
            stop = min(member.numel, start + length - offset)
            segments.append(BucketSegment(number, start, stop, slice_, offset))
            start = stop
    return segments


def cut_bucket(bucket: Bucket, part: slice) -> Bucket:
    """Return a part of a bucket; members outside of it are empty."""
    members = []
    for member in bucket.members:
        begin = max(member.offset, part.start)
        numel = max(0, min(member.offset + member.numel, part.stop) - begin)
        members.append(Member(member.index, numel, begin - part.start if numel else 0))
    return Bucket(bucket.dtype, tuple(members), part.stop - part.start)


def parts(
    bucket: Bucket, vector: torch.Tensor, present: Sequence[object]
) -> list[tuple[int, torch.Tensor | None]]:
    """Return (index, view of `vector`) for every member; (index, None) if it is not `present`."""
    return [
        (
            member.index,
            vector[member.offset : member.offset + member.numel] if there else None,
        )
        for member, there in zip(bucket.members, present, strict=True)
    ]
