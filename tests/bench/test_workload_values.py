"""Input values: calls that do nothing and misplaced data are detected."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tools.bench.measured_collectives import Part
from lockstep.tools.bench.workload import PERIOD, expected_block

RANKS = st.integers(1, 64)


def block(part: Part, ranks: int = 4, variant: int = 0) -> np.ndarray:
    return expected_block(part, ranks, variant)


@given(RANKS)
def test_the_variants_differ(ranks):
    for part in (Part(0), Part(0, 3)):
        first, second = (block(part, ranks, variant) for variant in (0, 1))
        assert (first != second).any()


def test_neighbouring_ranks_and_parts_differ():
    assert (block(Part(0)) != block(Part(1))).any()
    assert (block(Part(0, 0)) != block(Part(0, 1))).any()


@given(st.sampled_from([1 << power for power in range(20)]))
def test_shifted_block_differs(shift):
    assert (block(Part(0)) != np.roll(block(Part(0)), shift % PERIOD)).any()


@given(RANKS)
def test_a_reduction_is_that_of_the_ranks_numbers(ranks):
    table = [block(Part(rank, 2), ranks) for rank in range(ranks)]
    assert (block(Part(None, 2), ranks) == np.sum(table, axis=0)).all()
