"""Distributions over ranks: merging is exact, and the median is close."""

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.record.distribution import Distribution

VALUES = st.lists(st.integers(0, 10**13) | st.integers(0, 100), max_size=50)


@given(VALUES, VALUES, VALUES)
def test_merging_gives_the_distribution_of_all_values(a, b, c):
    one, two, three = map(Distribution.of, (a, b, c))
    whole = Distribution.of(a + b + c)
    assert one.merge(two).merge(three) == one.merge(two.merge(three)) == whole
    assert Distribution.unpack(json.loads(json.dumps(whole))) == whole


@given(VALUES.filter(bool))
def test_the_statistics_are_those_of_the_values(values):
    found = Distribution.of(values)
    assert (found.lowest, found.highest, found.size) == (min(values), max(values), len(values))
    assert found.mean == sum(values) / len(values)
    assert found.median == pytest.approx(statistics.median_low(values), rel=0.032)
    assert sum(count for _, count in found.bins) == len(values)


def test_small_numbers_have_their_own_bins():
    for value in range(40):
        assert Distribution.of([value, value, 10**6]).median == pytest.approx(value, abs=value / 32)
    assert Distribution().median == Distribution().mean == 0


def test_the_size_does_not_grow_with_the_number_of_values():
    few = Distribution.of(range(50_000, 100_000, 50))
    many = Distribution.of(range(50_000, 100_000, 5))
    assert len(few.bins) == len(many.bins) <= 17
