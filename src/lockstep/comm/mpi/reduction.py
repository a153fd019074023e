"""How MPI reduces tensors: the operation, and the type of the elements, for each of torch's.

A plan has names only, so that this module needs no MPI. MPI has no 16-bit floats: they are added
by functions of torch that MPI calls (`torch_function`), each addition in float32 and rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ReductionPlan", "plan_reduction", "torch_function", "type_of_size"]

MOVED = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
REDUCED = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.bool: "UINT8_T",
    torch.complex64: "FLOAT",  # real and imaginary parts are added separately
    torch.complex128: "DOUBLE",
    torch.float16: "INT16_T",
    torch.bfloat16: "INT16_T",
}
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
OPERATIONS = {"SUM": "SUM", "AVG": "SUM", "PREMUL_SUM": "SUM", "PRODUCT": "PROD",
              "MIN": "MIN", "MAX": "MAX", "BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}  # fmt: skip
# A bool is a byte that must stay 0 or 1.
OF_BOOLS = {"SUM": "MAX", "PRODUCT": "MIN", "MIN": "MIN", "MAX": "MAX",
            "BAND": "MIN", "BOR": "MAX", "BXOR": "BXOR"}  # fmt: skip


@dataclass(frozen=True)
class ReductionPlan:
    """How MPI computes one of torch's reductions.

    Attributes:
        operation: The name of MPI's operation, such as "SUM".
        mpi_type: The name of MPI's type, such as "FLOAT".
        numbers: The numbers of that type per element of the tensor.
        uses_torch: Whether MPI calls a function of torch instead of its own operation.
        is_average: Whether the sum is divided by the number of ranks.
        is_scaled: Whether every rank multiplies its values by the factor of PREMUL_SUM first.
    """

    operation: str
    mpi_type: str
    numbers: int = 1
    uses_torch: bool = False
    is_average: bool = False
    is_scaled: bool = False


def plan_reduction(operation: str, dtype: torch.dtype) -> ReductionPlan:
    """Return the plan of an operation of `torch.distributed.ReduceOp`, such as "SUM".

    Raises:
        ValueError: There is no such reduction; the message names the operation and the dtype.
    """
    name = str(dtype).removeprefix("torch.")
    is_inexact = dtype.is_floating_point or dtype.is_complex
    is_refused = (
        dtype not in REDUCED
        or (operation in ("AVG", "PREMUL_SUM") and not is_inexact)
        or (operation in ("BAND", "BOR", "BXOR") and is_inexact)
        or (operation in ("PRODUCT", "MIN", "MAX") and dtype.is_complex)
    )
    if is_refused:
        raise ValueError(f"there is no reduction {operation} of {name}")
    return ReductionPlan(
        (OF_BOOLS if dtype == torch.bool else OPERATIONS)[operation],
        REDUCED[dtype],
        numbers=2 if dtype.is_complex else 1,
        uses_torch=dtype in SIXTEEN_BITS,
        is_average=operation == "AVG",
        is_scaled=operation == "PREMUL_SUM",
    )


def type_of_size(itemsize: int) -> str:
    """Return the name of the MPI type that moves elements of `itemsize` bytes unchanged."""
    return MOVED[itemsize]


def torch_function(operation: str) -> Callable[..., Any]:
    """Return the element-wise function of torch that computes MPI's operation."""
    functions: dict[str, Callable[..., Any]] = {
        "SUM": torch.add, "PROD": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
        "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
    }  # fmt: skip
    return functions[operation]
