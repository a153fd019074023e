"""The boundary: what crosses from one stage to the next, and lies there as it lay before.

    value       (h, {"mask": m}, None)           tuples, lists, dicts, numbers, texts, None
    pattern     ("(", ((0,), ("{", ("mask",), ((1,),)), ("=", None)))     tensors by number,
                with the pairs of them that share memory, if there are any
    tensors     h, m                              each once, however often it is named
    forms       dtype, shape, strides, place within 64 bytes, whether it needs a gradient,
                whether its elements are to be conjugated or negated when they are read

A kernel may choose its path by strides and by alignment, so the receiver puts every
tensor at the same strides and the same distance from a 64-byte boundary. A tensor
that fills a block of memory travels as it lies, without a copy; one with gaps is
packed, and laid out with its gaps again. Nothing here moves a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch

from lockstep.errors import LayoutError

__all__ = [
    "Aliases",
    "Form",
    "Pattern",
    "aliases_of",
    "assembled",
    "described",
    "flattened",
    "form_of",
    "landed",
    "octets",
    "read",
    "room",
    "with_aliases",
]

ALIGNMENT = 64

Pattern = tuple[Any, ...]
"""How a nested value is made of its tensors: plain nested tuples, comparable."""

Aliases = tuple[tuple[int, int], ...]
"""Pairs of tensors of a value, by number, that share memory."""


@dataclass(frozen=True)
class Form:
    """How a tensor lies: strides in elements, `offset` in bytes behind a multiple of 64.

    A `conjugated` or `negated` tensor is a lazy one (`torch.Tensor.is_conj`, `is_neg`): the
    bytes that travel are those in its memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    differentiable: bool
    conjugated: bool = False
    negated: bool = False

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """The shape that travels: a dimension of stride 0 repeats one element."""
        return tuple(
            1 if not stride and size else size
            for size, stride in zip(self.shape, self.strides, strict=True)
        )

    @cached_property
    def nbytes(self) -> int:
        """How many bytes travel."""
        return prod(self.packed) * self.dtype.itemsize

    @cached_property
    def dense(self) -> bool:
        """Whether the elements that travel fill a block of memory."""
        expected = 1
        for stride, size in sorted(zip(self.strides, self.packed, strict=True)):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    @cached_property
    def lead(self) -> int:
        """How many bytes behind a multiple of 64 the bytes that travel have to land."""
        return self.offset if self.dense else 0


form = lru_cache(maxsize=4096)(Form)  # the same few come again and again


def flattened(value: Any) -> tuple[Pattern, list[torch.Tensor]]:
    """Return a nested value's pattern and its tensors, each once.

    Raises LayoutError for what cannot cross a boundary.
    """
    if type(value) is torch.Tensor:  # nearly always
        return (0,), [value]
    tensors: list[torch.Tensor] = []
    return _pattern(value, tensors, {}), tensors


def _pattern(value: Any, tensors: list[torch.Tensor], known: dict[int, int]) -> Pattern:
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            known[id(value)] = len(tensors)
            tensors.append(value)
        return (known[id(value)],)
    if value is None or type(value) in (bool, int, float, str):
        return ("=", value, repr(value))  # 1, 1.0 and True are equal, and 0.0 is -0.0
    if type(value) in (tuple, list):
        inner = tuple(_pattern(part, tensors, known) for part in value)
        return ("(" if type(value) is tuple else "[", inner)
    if type(value) is dict and all(type(name) is str for name in value):
        inner = tuple(_pattern(part, tensors, known) for part in value.values())
        return ("{", tuple(value), inner)
    raise LayoutError(
        f"a block returned a {type(value).__name__} at the end of a stage: what crosses to the "
        "next stage are tensors, numbers, texts and None, in tuples, lists and dicts with texts "
        "as keys"
    )


def assembled(pattern: Pattern, tensors: Sequence[Any]) -> Any:
    """Return the value of this pattern with the given tensors (or what stands for them)."""
    kind = pattern[0]
    if kind == "=":
        return pattern[1]
    if kind == "&":
        return assembled(pattern[2], tensors)
    if kind == "{":
        return {
            name: assembled(part, tensors)
            for name, part in zip(pattern[1], pattern[2], strict=True)
        }
    if kind in ("(", "["):
        parts = [assembled(part, tensors) for part in pattern[1]]
        return tuple(parts) if kind == "(" else parts
    return tensors[kind]


def with_aliases(pattern: Pattern, aliases: Aliases) -> Pattern:
    """Return a pattern that also says which of its tensors share memory."""
    return ("&", aliases, pattern) if aliases else pattern


def aliases_of(pattern: Pattern) -> Aliases:
    """Return what a pattern says of tensors that share memory."""
    aliases: Aliases = pattern[1] if pattern[0] == "&" else ()
    return aliases


def form_of(tensor: torch.Tensor) -> Form:
    """Return how a tensor lies; LayoutError where it does not lie in memory at all."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise LayoutError(
            f"a {tensor.layout} tensor cannot cross from one stage to the next: make it dense"
        )
    return form(
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.data_ptr() % ALIGNMENT,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def octets(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """Return the bytes that travel, as a vector: a view where the tensor fills its memory."""
    tensor = _read_as(tensor.detach(), conjugated=False, negated=False)
    if 0 in form.strides:
        tensor = tensor.as_strided(form.packed, form.strides)
    if form.dense:
        tensor = tensor.as_strided((form.nbytes // form.dtype.itemsize,), (1,))
    else:
        tensor = tensor.contiguous().view(-1)
    return tensor.view(torch.uint8)


def room(form: Form, device: torch.device) -> torch.Tensor:
    """Return new memory for the bytes that travel; they have to land behind its lead."""
    return torch.empty(form.lead + form.nbytes, dtype=torch.uint8, device=device)


def landed(memory: torch.Tensor, begin: int, form: Form) -> torch.Tensor:
    """Return the tensor whose bytes landed at `begin` of `memory`; one of its own, no view.

    So an in-place operation may follow, as after the operation that made it. `memory`
    are bytes that begin at a multiple of 64.
    """
    tensor = _lying_as(memory, begin, form)
    return _read_as(tensor, form.conjugated, form.negated)


def _lying_as(memory: torch.Tensor, begin: int, form: Form) -> torch.Tensor:
    if form.dense:
        return _lying(memory, begin, form, form.shape)
    received = memory[begin : begin + form.nbytes].view(form.dtype).view(form.packed)
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(form.shape, form.strides, strict=True)
    )
    spread = torch.empty(
        form.offset + span * form.dtype.itemsize, dtype=torch.uint8, device=memory.device
    )
    _lying(spread, form.offset, form, form.packed).copy_(received)
    return _lying(spread, form.offset, form, form.shape)


def _lying(memory: torch.Tensor, begin: int, form: Form, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.empty(0, dtype=form.dtype, device=memory.device)
    storage = memory.untyped_storage()
    with torch.no_grad():
        return tensor.set_(storage, begin // form.dtype.itemsize, shape, form.strides)


def _read_as(tensor: torch.Tensor, conjugated: bool, negated: bool) -> torch.Tensor:
    """Mark a tensor, in place, as one whose elements are conjugated or negated when read."""
    if tensor.is_conj() != conjugated:
        torch._C._set_conj(tensor, conjugated)
    if tensor.is_neg() != negated:
        torch._C._set_neg(tensor, negated)
    return tensor


def described(pattern: Any, forms: Sequence[Form]) -> list[Any]:
    """Return pattern and forms as JSON values; `read` is the way back."""
    return [
        pattern,
        [
            [
                str(f.dtype).removeprefix("torch."),
                f.shape,
                f.strides,
                f.offset,
                f.differentiable,
                f.conjugated,
                f.negated,
            ]
            for f in forms
        ],
    ]


def read(description: Sequence[Any]) -> tuple[Pattern, list[Form]]:
    """Return the pattern and forms of what `described` returned, after JSON."""
    pattern, forms = description
    return _tupled(pattern), [
        form(getattr(torch, dtype), tuple(shape), tuple(strides), *rest)
        for dtype, shape, strides, *rest in forms
    ]


def _tupled(value: Any) -> Any:
    return tuple(_tupled(part) for part in value) if isinstance(value, list) else value
