"""Input values: calls that do nothing and misplaced data are detected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tools.bench.measured_collectives import Part
from lockstep.tools.bench.workload import OPS, PERIOD, expected_block, itemsize

RANKS = st.integers(1, 64)


def block(part: Part, ranks: int = 4, variant: int = 0, op: str = "SUM") -> np.ndarray:
    return expected_block(part, ranks, variant, op)


@given(RANKS, st.sampled_from(list(OPS)))
def test_the_variants_differ(ranks, op):
    for part in (Part(0), Part(0, 3)):
        first, second = (block(part, ranks, variant, op) for variant in (0, 1))
        assert (first != second).any()


def test_neighbouring_ranks_and_parts_differ():
    assert (block(Part(0)) != block(Part(1))).any()
    assert (block(Part(0, 0)) != block(Part(0, 1))).any()


@given(st.sampled_from([1 << power for power in range(20)]))
def test_shifted_block_differs(shift):
    assert (block(Part(0)) != np.roll(block(Part(0)), shift % PERIOD)).any()


@given(RANKS, st.sampled_from(["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]))
def test_a_reduction_is_that_of_the_ranks_numbers(ranks, op):
    table = [block(Part(rank, 2), ranks, 0, op).tolist() for rank in range(ranks)]
    for place in range(0, PERIOD, 97):
        column = [row[place] for row in table]
        found = block(Part(None, 2), ranks, 0, op)[place]
        plain = {"SUM": sum, "MIN": min, "MAX": max}.get(op)
        if plain:
            assert found == plain(column)
        else:
            wanted = column[0]
            for value in column[1:]:
                wanted = {"PRODUCT": wanted * value, "BAND": wanted & value,
                          "BOR": wanted | value, "BXOR": wanted ^ value}[op]  # fmt: skip
            assert found == wanted


@given(RANKS)
def test_results_are_exact_in_every_dtype(ranks):
    assert block(Part(None), ranks, op="PRODUCT").max() <= 2
    assert block(Part(None), ranks).max() <= 256  # bfloat16 counts to 256


def test_a_mean_is_the_sum_over_the_ranks():
    assert (block(Part(None), 3, op="AVG") * 3 == block(Part(None), 3)).all()


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("uint8", 1)])
def test_bytes_of_an_element(dtype, size):
    assert itemsize(dtype) == size
