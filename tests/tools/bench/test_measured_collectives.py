"""The collectives as plain values: sizes and bandwidth factors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tools.bench.measured_collectives import COLLECTIVES

RANKS = st.integers(1, 64)
NAMES = st.sampled_from(list(COLLECTIVES))


@given(NAMES, st.integers(0, 1 << 30), st.sampled_from([1, 2, 4, 8]), RANKS)
def test_a_size_is_rounded_up_to_whole_parts(name, size, itemsize, ranks):
    one = COLLECTIVES[name]
    count = one.elements(size, itemsize, ranks)
    actual = one.bytes(count, itemsize, ranks)
    if name == "barrier":
        assert actual == 0
    else:
        parts = ranks if one.has_part_per_rank else 1
        assert actual >= size
        assert actual - size < itemsize * parts or count == 1
        assert actual % (itemsize * parts) == 0


@pytest.mark.parametrize(
    ("name", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75),
     ("gather", 0.75), ("scatter", 0.75), ("broadcast", 1.0), ("reduce", 1.0), ("send_recv", 1.0)],
)  # fmt: skip
def test_bus_bandwidth_factors_are_those_of_nccl_tests(name, factor):
    assert COLLECTIVES[name].bus_factor(4) == factor
