"""The reductions of torch in terms of MPI."""

import pytest
import torch

from contract.plain import FLOAT8, OPS, REDUCIBLE, is_meaningless
from lockstep.comm.mpi.reduction import plan_reduction, torch_function, type_of_size

WIDTHS = {"DOUBLE": 8, "FLOAT": 4, "INT8_T": 1, "INT16_T": 2, "INT32_T": 4, "INT64_T": 8,
          "UINT8_T": 1, "UINT16_T": 2, "UINT32_T": 4, "UINT64_T": 8}  # fmt: skip


@pytest.mark.parametrize("dtype", [*REDUCIBLE, *FLOAT8])
@pytest.mark.parametrize("op", OPS)
def test_every_reduction_is_planned_or_refused_by_name(op, dtype):
    is_whole = not dtype.is_floating_point and not dtype.is_complex
    is_refusable = dtype in FLOAT8 or (op in ("AVG", "PREMUL_SUM") and is_whole)
    if is_refusable or is_meaningless(op, dtype):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(ValueError, match=f"no reduction {op} of {name}"):
            plan_reduction(op, dtype)
        return
    plan = plan_reduction(op, dtype)
    assert WIDTHS[plan.mpi_type] * plan.numbers == dtype.itemsize
    assert plan.uses_torch == (dtype in (torch.float16, torch.bfloat16))


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("right", [0, 1])
def test_bools_stay_bools(op, left, right):
    plan = plan_reduction(op, torch.bool)
    bits = [torch.tensor([value], dtype=torch.uint8) for value in (left, right)]
    wanted = {"SUM": left or right, "MAX": left or right, "BOR": left or right,
              "PRODUCT": left and right, "MIN": left and right, "BAND": left and right,
              "BXOR": left ^ right}  # fmt: skip
    assert torch_function(plan.operation)(*bits).item() == wanted[op]


def test_elements_of_every_size_can_be_moved():
    assert {type_of_size(dtype.itemsize) for dtype in (*REDUCIBLE, *FLOAT8)} == {
        "BYTE", "INT16_T", "INT32_T", "INT64_T", "C_DOUBLE_COMPLEX",
    }  # fmt: skip
