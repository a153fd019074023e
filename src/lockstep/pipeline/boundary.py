"""The values that cross a stage boundary: nested containers of tensors, with their layout.

    value       (h, {"mask": m}, None)           tuples, lists, dicts, numbers, strings, None
    structure   ("(", ((0,), ("{", ("mask",), ((1,),)), ("=", None)))     tensors by number,
                with the pairs of tensors that share memory, if any
    tensors     h, m                             each once, even if it occurs several times
    metadata    dtype, shape, strides, offset from a multiple of 64 bytes, requires_grad,
                lazy conjugation and negation

A kernel may choose its algorithm by strides and alignment, so the receiver restores the strides
of every tensor and its offset from a 64-byte boundary. A tensor without gaps is sent from its
own memory, without a copy. A tensor with gaps is packed before it is sent, and unpacked after.
This module transfers nothing; see `lockstep.pipeline.p2p`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch

from lockstep.kernel.errors import LayoutError

__all__ = [
    "Aliases",
    "Structure",
    "TensorMeta",
    "add_aliases",
    "allocate_for",
    "describe_tensor",
    "flatten",
    "get_aliases",
    "unflatten",
    "view_bytes",
    "view_received",
]

ALIGNMENT = 64

Structure = tuple[Any, ...]
"""The nesting of a value, without its tensors: nested tuples, which can be compared."""

Aliases = tuple[tuple[int, int], ...]
"""Pairs of tensors of a value, by number, that share memory."""


@dataclass(frozen=True)
class TensorMeta:
    """The dtype and memory layout of a tensor.

    Attributes:
        dtype: The dtype.
        shape: The shape.
        strides: The strides, in elements.
        offset: The offset of the first element from a multiple of 64 bytes.
        requires_grad: Whether the tensor requires a gradient.
        conjugated: Whether it is a lazy conjugate (`torch.Tensor.is_conj`), whose memory holds
            the elements before conjugation.
        negated: Whether it is lazily negated (`torch.Tensor.is_neg`).
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool
    conjugated: bool = False
    negated: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields alone, without what was computed from them."""
        return TensorMeta, tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape that is sent; a dimension with stride 0 is sent as one element."""
        return tuple(
            1 if not stride and size else size
            for size, stride in zip(self.shape, self.strides, strict=True)
        )

    @cached_property
    def nbytes(self) -> int:
        """The number of bytes that are sent."""
        return prod(self.packed_shape) * self.dtype.itemsize

    @cached_property
    def is_dense(self) -> bool:
        """Whether the elements that are sent fill a block of memory without gaps."""
        expected = 1
        for stride, size in sorted(zip(self.strides, self.packed_shape, strict=True)):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    @cached_property
    def padding(self) -> int:
        """The offset in bytes from a multiple of 64 at which the receiver stores the data."""
        return self.offset if self.is_dense else 0


make_meta = lru_cache(maxsize=4096)(TensorMeta)  # a model sends few distinct layouts


def flatten(value: Any) -> tuple[Structure, list[torch.Tensor]]:
    """Return the structure of a nested value, and its distinct tensors.

    Raises:
        LayoutError: The value contains objects that cannot be sent to another stage.
    """
    if type(value) is torch.Tensor:  # the most frequent case
        return (0,), [value]
    tensors: list[torch.Tensor] = []
    return _build_structure(value, tensors, {}), tensors


def _build_structure(value: Any, tensors: list[torch.Tensor], known: dict[int, int]) -> Structure:
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            known[id(value)] = len(tensors)
            tensors.append(value)
        return (known[id(value)],)
    if value is None or type(value) in (bool, int, float, str):
        return ("=", value, repr(value))  # repr: 1 == 1.0 == True, and 0.0 == -0.0
    if type(value) in (tuple, list):
        inner = tuple(_build_structure(part, tensors, known) for part in value)
        return ("(" if type(value) is tuple else "[", inner)
    if type(value) is dict and all(type(name) is str for name in value):
        inner = tuple(_build_structure(part, tensors, known) for part in value.values())
        return ("{", tuple(value), inner)
    raise LayoutError(
        f"the last block of a stage returned a {type(value).__name__}: only tensors, numbers, "
        "strings and None, in tuples, lists and dicts with string keys, can be sent to the next "
        "stage"
    )


def unflatten(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Return the value with this structure and the given tensors (or their replacements)."""
    kind = structure[0]
    if kind == "=":
        return structure[1]
    if kind == "&":
        return unflatten(structure[2], tensors)
    if kind == "{":
        return {
            name: unflatten(part, tensors)
            for name, part in zip(structure[1], structure[2], strict=True)
        }
    if kind in ("(", "["):
        parts = [unflatten(part, tensors) for part in structure[1]]
        return tuple(parts) if kind == "(" else parts
    return tensors[kind]


def add_aliases(structure: Structure, aliases: Aliases) -> Structure:
    """Return a structure that also lists the tensors that share memory."""
    return ("&", aliases, structure) if aliases else structure


def get_aliases(structure: Structure) -> Aliases:
    """Return the pairs of tensors in a structure that share memory."""
    aliases: Aliases = structure[1] if structure[0] == "&" else ()
    return aliases


def describe_tensor(tensor: torch.Tensor) -> TensorMeta:
    """Return the layout of a tensor.

    Raises:
        LayoutError: The tensor is not a dense one, such as a sparse tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise LayoutError(
            f"a {tensor.layout} tensor cannot be sent to another stage: make it dense"
        )
    return make_meta(
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.data_ptr() % ALIGNMENT,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def view_bytes(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return the bytes to send, as a vector: a view if the tensor has no gaps, or a copy."""
    tensor = _mark_lazy(tensor.detach(), conjugated=False, negated=False)
    if 0 in meta.strides:
        tensor = tensor.as_strided(meta.packed_shape, meta.strides)
    if meta.is_dense:
        tensor = tensor.as_strided((meta.nbytes // meta.dtype.itemsize,), (1,))
    else:
        tensor = tensor.contiguous().view(-1)
    return tensor.view(torch.uint8)


def allocate_for(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    """Return new memory for the bytes of a tensor, after its padding."""
    return torch.empty(meta.padding + meta.nbytes, dtype=torch.uint8, device=device)


def view_received(memory: torch.Tensor, begin: int, meta: TensorMeta) -> torch.Tensor:
    """Return the tensor whose bytes were received into memory.

    To autograd it is not a view, so in-place operations may follow, as on the sender.

    Args:
        memory: Bytes, aligned to 64.
        begin: The offset of the tensor's bytes in the memory.
        meta: The layout of the tensor.
    """
    tensor = _restore_layout(memory, begin, meta)
    return _mark_lazy(tensor, meta.conjugated, meta.negated)


def _restore_layout(memory: torch.Tensor, begin: int, meta: TensorMeta) -> torch.Tensor:
    if meta.is_dense:
        return _make_strided(memory, begin, meta, meta.shape)
    received = memory[begin : begin + meta.nbytes].view(meta.dtype).view(meta.packed_shape)
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(meta.shape, meta.strides, strict=True)
    )
    spread = torch.empty(
        meta.offset + span * meta.dtype.itemsize, dtype=torch.uint8, device=memory.device
    )
    _make_strided(spread, meta.offset, meta, meta.packed_shape).copy_(received)
    return _make_strided(spread, meta.offset, meta, meta.shape)


def _make_strided(
    memory: torch.Tensor, begin: int, meta: TensorMeta, shape: tuple[int, ...]
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=meta.dtype, device=memory.device)
    storage = memory.untyped_storage()
    with torch.no_grad():
        return tensor.set_(storage, begin // meta.dtype.itemsize, shape, meta.strides)


def _mark_lazy(tensor: torch.Tensor, conjugated: bool, negated: bool) -> torch.Tensor:
    """Set the flags of a tensor that conjugate or negate its elements lazily, in place."""
    if tensor.is_conj() != conjugated:
        torch._C._set_conj(tensor, conjugated)
    if tensor.is_neg() != negated:
        torch._C._set_neg(tensor, negated)
    return tensor
