"""The first element that differs between two tensors, and how far the two values are apart."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch

from lockstep.kernel.buffers import as_bytes

__all__ = ["ElementDifference", "first_element_difference"]

Number = bool | int | float | complex


@dataclass(frozen=True)
class ElementDifference:
    """The first difference between two tensors of the same shape.

    Attributes:
        index: The position of the first element whose bits differ, in row-major order.
        a: Its value in the first tensor.
        b: Its value in the second tensor.
        ulps: Their distance in units in the last place, which are the steps from one value of the
            dtype to the next: 1 for neighbours, 0 for zeros of different sign. For integers and
            bools, their difference; for complex numbers, the larger distance of both parts. None
            for a NaN.
        count: The number of elements that differ.
    """

    index: tuple[int, ...]
    a: Number
    b: Number
    ulps: int | None
    count: int


def first_element_difference(a: torch.Tensor, b: torch.Tensor) -> ElementDifference | None:
    """Compare the bits of two tensors element by element.

    Args:
        a: A tensor of any dtype and layout.
        b: Another tensor, of the same dtype and shape.

    Returns:
        The first difference; None if all elements are equal.
    """
    a = _plain(a)
    b = _plain(b)
    unequal = (_bits(a) != _bits(b)).any(dim=-1)
    count = int(unequal.sum())
    if not count:
        return None
    flat = int(unequal.reshape(-1).to(torch.uint8).argmax())
    index = tuple(int(position) for position in torch.unravel_index(torch.tensor(flat), a.shape))
    x = a[index]
    y = b[index]
    return ElementDifference(index, x.item(), y.item(), _distance(x, y), count)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements, contiguous on the CPU."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu().resolve_conj().resolve_neg().contiguous()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element as integers, in an additional last dimension."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.unsqueeze(-1).view(kinds.get(tensor.element_size(), torch.int64))


def _distance(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """Return the distance of two scalars of the same dtype, in units in the last place."""
    if a.is_complex():
        parts = [_distance(*pair) for pair in ((a.real, b.real), (a.imag, b.imag))]
        known = [distance for distance in parts if distance is not None]
        return max(known) if len(known) == len(parts) else None
    x = a.item()
    y = b.item()
    if not a.is_floating_point():
        return abs(int(x) - int(y))
    if math.isnan(x) or math.isnan(y):
        return None
    return abs(_rank(a) - _rank(b))


def _rank(value: torch.Tensor) -> int:
    """Return the position of a float among all values of its dtype; 0 for both zeros."""
    data = as_bytes(value.contiguous()).tolist()
    number = int.from_bytes(bytes(data), sys.byteorder)
    sign = 1 << (8 * len(data) - 1)
    return number if number < sign else sign - number
