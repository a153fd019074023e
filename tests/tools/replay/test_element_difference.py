"""The first element that differs, and its distance in units in the last place."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tools.replay.element_difference import ElementDifference, first_element_difference

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def next_value(value: torch.Tensor, steps: int = 1) -> torch.Tensor:
    """Return a positive float tensor with each value so many steps away from zero."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = value.contiguous().view(kinds[value.element_size()])
    return (bits + steps).view(value.dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_distance_counts_the_values_of_the_dtype(dtype):
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype)
    b = a.clone()
    b[1, 0] = next_value(a[1, 0], 2)
    b[1, 1] = next_value(a[1, 1])
    found = first_element_difference(a, b)
    assert found == ElementDifference((1, 0), 3.0, float(b[1, 0]), 2, 2)
    assert first_element_difference(a, a.clone()) is None
    # The smallest values of both signs are two steps apart, with zero between them.
    tiny = next_value(torch.zeros(1).to(dtype))
    assert first_element_difference(tiny, (-tiny.to(torch.float64)).to(dtype)).ulps == 2
    zeros = first_element_difference(torch.zeros(1).to(dtype), torch.tensor([-0.0]).to(dtype))
    assert (zeros.ulps, zeros.count, math.copysign(1, zeros.b)) == (0, 1, -1)


def test_values_that_are_no_plain_floats():
    nan = torch.tensor([math.nan])
    inf = torch.tensor([math.inf])
    assert first_element_difference(nan, nan.clone()) is None
    assert first_element_difference(nan, torch.ones(1)).ulps is None
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert first_element_difference(inf, largest).ulps == 1
    assert first_element_difference(torch.tensor([3]), torch.tensor([-9])).ulps == 12
    bits = first_element_difference(torch.tensor([True, True]), torch.tensor([True, False]))
    assert bits == ElementDifference((1,), True, False, 1, 1)
    left = torch.tensor([1 + 1j, 2 + 2j])
    right = torch.tensor([1 + 1j, 2 + 2.0000002j])
    assert first_element_difference(left, right).ulps == 1
    assert first_element_difference(left, left.conj().conj()) is None
    scalar = first_element_difference(torch.tensor(1.0), torch.tensor(2.0))
    assert (scalar.index, scalar.ulps) == ((), 1 << 23)


def test_layouts():
    values = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    other = values.clone()
    other[1, 0] = 5.0
    assert first_element_difference(values.to_sparse(), other.to_sparse()).index == (1, 0)
    assert first_element_difference(values.t(), other.t()).index == (0, 1)
    assert first_element_difference(torch.zeros(0), torch.zeros(0)) is None


doubles = st.floats(allow_nan=False, width=32)


def rank(value: float) -> int:
    """Return the position of a float32 among all of them, counted from zero."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return bits if bits < 1 << 31 else (1 << 31) - bits


@given(st.lists(st.tuples(doubles, doubles), min_size=1, max_size=20))
def test_first_and_number_are_those_of_a_loop(pairs):
    a, b = (torch.tensor(each, dtype=torch.float32) for each in zip(*pairs, strict=True))
    found = first_element_difference(a, b)
    unequal = [n for n, (x, y) in enumerate(pairs) if struct.pack("<f", x) != struct.pack("<f", y)]
    if not unequal:
        assert found is None
        return
    first = unequal[0]
    x, y = pairs[first]
    assert found == ElementDifference((first,), x, y, abs(rank(x) - rank(y)), len(unequal))
