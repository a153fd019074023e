"""Exact sums: the result of `math.fsum`, in any order and grouping."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.exact_sum import ExactSum, add_exactly

MODERATE = st.floats(-1e300, 1e300)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(MODERATE, max_size=20), st.data())
def test_parts_add_up_to_the_sum_that_is_rounded_once(values, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    bounds = zip([0, *cuts], [*cuts, len(values)], strict=True)
    parts = [ExactSum.of(values[lo:hi]) for lo, hi in bounds]
    total = ExactSum()
    for part in data.draw(st.permutations(parts)):
        total = add_exactly(total, ExactSum(*json.loads(json.dumps(part))))
    assert total == ExactSum.of(values)
    assert float(total).hex() == math.fsum(values).hex()


@given(FINITE, FINITE, FINITE)
def test_addition_is_associative_for_all_finite_numbers(a, b, c):
    one, two, three = (ExactSum.of([each]) for each in (a, b, c))
    left = add_exactly(add_exactly(one, two), three)
    assert left == add_exactly(one, add_exactly(two, three))
    assert float(one) == a


def test_sums_that_are_too_large_or_not_finite():
    assert float(ExactSum.of([1e308, 1e308])) == math.inf
    assert float(ExactSum.of([-1e308, -1e308])) == -math.inf
    assert float(ExactSum.of([1e308, 1e308, -1e308])) == 1e308
    assert float(ExactSum.of([1.0, math.inf])) == math.inf
    assert math.isnan(float(ExactSum.of([math.inf, -math.inf])))
    assert math.isnan(float(add_exactly(ExactSum.of([math.nan]), ExactSum.of([1.0]))))
    assert float(ExactSum()) == 0.0
    assert float(ExactSum.of([5e-324, 5e-324])) == 1e-323
