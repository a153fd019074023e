"""Exact sums: the result of `math.fsum`, in any order and grouping."""

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.exact_sum import compute_partial_sums, merge_partial_sums, round_sum


@given(st.lists(st.floats(-1e300, 1e300), max_size=20), st.data())
def test_parts_add_up_to_the_sum_that_is_rounded_once(values, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    bounds = zip([0, *cuts], [*cuts, len(values)], strict=True)
    parts = [compute_partial_sums(values[lo:hi]) for lo, hi in bounds]
    total = []
    for part in data.draw(st.permutations(parts)):
        total = merge_partial_sums(total, json.loads(json.dumps(part)))
        assert len(total) < 40
    assert total == compute_partial_sums(values)
    assert sum(map(Fraction, total)) == sum(map(Fraction, values))
    assert round_sum(total) == math.fsum(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e308, 1e308], math.inf),
        ([-1e308, -1e308], -math.inf),
        ([1.0, math.inf], math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([], 0.0),
        ([5e-324, 5e-324], 1e-323),
    ],
)
def test_sums_that_are_too_large_or_not_finite(values, expected):
    assert round_sum(values) == pytest.approx(expected, abs=0, nan_ok=True)
    merged = []
    for value in values:
        merged = merge_partial_sums(merged, compute_partial_sums([value]))
    assert round_sum(merged) == pytest.approx(expected, abs=0, nan_ok=True)
