"""The plain reference: what every rank wrote, and what must come out. Nothing is sent.

Values are small whole numbers, so that sums and products are the same in any
order and any precision; every rank can work out everybody's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

TABLE = torch.tensor([1, -2, 3, -1, 2, 1, -3])
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
REDUCIBLE = (*FLOATS, *INTEGERS, *UNSIGNED[1:], torch.bool, *COMPLEX)
MOVABLE = (*REDUCIBLE, *FLOAT8)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
FACTOR = 0.5  # of PREMUL_SUM
Shape = int | Sequence[int]
Allocate = Callable[..., torch.Tensor]  # as torch.empty

_memory: list[Allocate] = [torch.empty]


def lie_in(allocate: Allocate) -> None:
    """Let all that is written from now on lie in memory from `allocate`."""
    _memory[0] = allocate


def placed(tensor: torch.Tensor) -> torch.Tensor:
    return _memory[0](tensor.shape, dtype=tensor.dtype).copy_(tensor)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors one after the other, in the memory that is tried."""
    return placed(torch.cat(list(tensors)))


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def written(
    rank: int, shape: Shape, dtype: torch.dtype = torch.float32, part: int = 0
) -> torch.Tensor:
    """Return what `rank` wrote into its part `part`."""
    size = torch.Size([shape] if isinstance(shape, int) else shape)
    return placed(pattern(rank, size.numel(), dtype, part).reshape(size))


@functools.lru_cache(maxsize=4096)
def pattern(rank: int, count: int, dtype: torch.dtype, part: int) -> torch.Tensor:
    """Return the numbers of `written`, which copies them: most cases need the same ones."""
    place = torch.arange(count)
    return cast(TABLE[(place * 5 + place // 7 + rank * 3 + part * 2) % 7], dtype)


def cast(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers in `dtype`: absolute where unsigned, whether positive where bool."""
    if dtype == torch.bool:
        return numbers > 0
    if dtype in UNSIGNED:
        return numbers.abs().to(dtype)
    if dtype.is_complex:
        return torch.complex(numbers.double(), 2.0 - numbers.double()).to(dtype)
    return numbers.to(dtype)


def reduced(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the element-wise reduction, worked out in the widest type of its kind."""
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        return widest(op, [tensor.to(torch.int64) for tensor in tensors]).bool()
    wide = (
        torch.complex128
        if dtype.is_complex
        else torch.float64
        if dtype.is_floating_point
        else torch.int64
    )
    result = widest(op, [tensor.to(wide) for tensor in tensors])
    return (result.trunc() if wide == torch.int64 else result).to(dtype)


def widest(op: str, wide: list[torch.Tensor]) -> torch.Tensor:
    match op:
        case "SUM":
            return sum(wide[1:], start=wide[0])
        case "AVG":
            return sum(wide[1:], start=wide[0]) / len(wide)
        case "PREMUL_SUM":
            return sum(wide[1:], start=wide[0]) * FACTOR
        case "PRODUCT":
            return functools.reduce(torch.mul, wide)
        case "MIN":
            return functools.reduce(torch.minimum, wide)
        case "MAX":
            return functools.reduce(torch.maximum, wide)
        case "BAND":
            return functools.reduce(torch.bitwise_and, wide)
        case "BOR":
            return functools.reduce(torch.bitwise_or, wide)
        case "BXOR":
            return functools.reduce(torch.bitwise_xor, wide)
    raise ValueError(op)


def is_meaningless(op: str, dtype: torch.dtype) -> bool:
    """Whether no result would be right, so that the operation must be refused."""
    inexact = dtype.is_floating_point or dtype.is_complex
    if op.startswith("B"):
        return inexact
    return dtype.is_complex and op in ("PRODUCT", "MIN", "MAX")


def is_optional(op: str, dtype: torch.dtype) -> bool:
    """Whether a backend may refuse: averages and factors of whole numbers, sums of float8."""
    whole = not dtype.is_floating_point and not dtype.is_complex
    return (op in ("AVG", "PREMUL_SUM") and whole) or dtype in FLOAT8


def tolerance(op: str, dtype: torch.dtype) -> float:
    """Return the relative error that is allowed: a division may be done either way."""
    inexact = dtype.is_floating_point or dtype.is_complex
    return 2 * torch.finfo(dtype).eps if op == "AVG" and inexact else 0.0
