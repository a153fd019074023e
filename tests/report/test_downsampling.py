"""Thinning loses no peak, whatever the values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.downsampling import thin

VALUES = st.lists(
    st.floats(-1e6, 1e6) | st.sampled_from([np.nan, np.inf, -np.inf]), min_size=1, max_size=60
)


@given(VALUES, st.integers(1, 70))
def test_the_highest_and_lowest_value_are_kept(values, buckets):
    y = np.array(values)
    found = thin(np.arange(len(y), dtype=float), y, buckets)
    finite = y[np.isfinite(y)]
    if len(finite):
        assert np.nanmax(found.high) == finite.max()
        assert np.nanmin(found.low) == finite.min()
    else:
        assert np.isnan(found.mean).all()


@given(VALUES, st.integers(1, 70))
def test_buckets_follow_one_another_and_hold_every_place(values, buckets):
    x = np.arange(len(values), dtype=float)
    found = thin(x, np.array(values), buckets)
    assert len(found) == min(buckets, len(x))
    sizes = found.last - found.first + 1
    assert sizes.sum() == len(x)
    assert sizes.max() - sizes.min() <= 1
    assert (found.first[1:] == found.last[:-1] + 1).all()


@given(VALUES)
def test_means_lie_between(values):
    found = thin(np.arange(len(values), dtype=float), np.array(values), 7)
    known = np.isfinite(found.mean)
    assert (found.low[known] <= found.mean[known]).all()
    assert (found.mean[known] <= found.high[known]).all()


def test_what_is_not_finite_counts_nowhere():
    found = thin(np.arange(4.0), np.array([-3.0, np.nan, 5.0, np.inf]), 2)
    assert found.high.tolist() == [-3.0, 5.0]
    assert found.low.tolist() == [-3.0, 5.0]
    assert found.mean.tolist() == [-3.0, 5.0]


def test_few_values_are_left_alone():
    x, y = np.array([3.0, 5.0]), np.array([1.0, 2.0])
    found = thin(x, y, 400)
    assert not found.is_thinned
    assert found.mean.tolist() == y.tolist()
    assert found.x.tolist() == x.tolist()


def test_nothing_is_thinned_to_nothing():
    assert len(thin(np.empty(0), np.empty(0), 400)) == 0


def test_places_and_values_must_match():
    with pytest.raises(ValueError, match="2 places for 1 values"):
        thin(np.zeros(2), np.zeros(1), 4)
