"""Memory overlap: which tensors have memory in common.

    a   |--------|                 a and b overlap, and so do b and c
    b         |-----|-----|        adjacent or interleaved views of one storage
    c                  |-----|     do not overlap

Two parameters with the same memory (`b.weight.data = a.weight.data`) are tied until one of them
is moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import nn

__all__ = ["find_overlaps", "find_parameter_overlaps"]

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides in elements, bytes per element."""


def find_overlaps(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the pairs of tensors, by position, that have memory in common.

    Tensors without elements or without memory of their own (meta, sparse) overlap none.
    """
    extents = sorted(
        (str(each.device), *_extent(each), number)
        for number, each in enumerate(tensors)
        if each.layout is torch.strided and not each.is_meta and each.numel()
    )
    found: list[tuple[int, int]] = []
    open_: list[tuple[str, int, int, int]] = []
    for extent in extents:
        device, begin, _, number = extent
        open_ = [each for each in open_ if each[0] == device and each[2] > begin]
        found += [
            (min(other, number), max(other, number))
            for _, start, _, other in open_
            if _meet(begin - start, _geometry(tensors[other]), _geometry(tensors[number]))
        ]
        open_.append(extent)
    return sorted(found)


def find_parameter_overlaps(
    modules: Mapping[str, nn.Module], *, attributes: bool = False
) -> list[tuple[str, str]]:
    """Return the pairs of different tensors that have memory in common, by name.

    Args:
        modules: Modules by the prefix of their tensors' names.
        attributes: Whether to compare with tensors in plain attributes of the modules as well.

    Returns:
        Pairs with at least one parameter. A parameter that has several names is one tensor.
    """
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for root, model in modules.items():
        for name, tensor in _tensors_of(model, attributes):
            named.setdefault(id(tensor), (".".join(filter(None, (root, name))), tensor))
    names, tensors = zip(*named.values(), strict=True) if named else ((), ())
    return [
        (names[one], names[other])
        for one, other in find_overlaps(tensors)
        if isinstance(tensors[one], nn.Parameter) or isinstance(tensors[other], nn.Parameter)
    ]


def _tensors_of(model: nn.Module, attributes: bool) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules() if attributes else ():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


def _geometry(tensor: torch.Tensor) -> Geometry:
    return tuple(tensor.shape), tensor.stride(), tensor.element_size()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses where a tensor's elements begin and end."""
    begin = tensor.data_ptr()
    return begin, begin + _span(*_geometry(tensor))


def _span(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> int:
    """Return the bytes from the first element to the end of the last."""
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return (1 + last) * size


@lru_cache(maxsize=1024)
def _meet(distance: int, one: Geometry, other: Geometry) -> bool:
    """Return whether two tensors have a byte in common; `other` begins `distance` bytes later."""
    if not distance or (_dense(one) and _dense(other)):
        return True
    length = max(_span(*one), distance + _span(*other))
    marks = torch.zeros(length, dtype=torch.bool)
    _bytes_of(marks, 0, one).fill_(True)
    return bool(_bytes_of(marks, distance, other).any())


def _dense(geometry: Geometry) -> bool:
    """Return whether the elements fill the memory between the first and the last."""
    shape, strides, _ = geometry
    expected = 1
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n > 1 and stride:
            if stride != expected:
                return False
            expected *= n
    return True


def _bytes_of(marks: torch.Tensor, begin: int, geometry: Geometry) -> torch.Tensor:
    """Return the marks of the bytes of a tensor that lies so; a repeated element has one."""
    shape, strides, size = geometry
    shape = tuple(n if stride else 1 for n, stride in zip(shape, strides, strict=True))
    return marks.as_strided((*shape, size), (*(each * size for each in strides), 1), begin)
