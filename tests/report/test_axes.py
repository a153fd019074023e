"""Axes hold what they are made for, and say round numbers."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.formatting import format_duration, format_percent
from lockstep.report.axes import linear, logarithmic, spanning, tidy

NUMBERS = st.floats(-1e12, 1e12)
POSITIVE = st.floats(1e-300, 1e300)


def labels(axis):
    return [tick.label for tick in axis.ticks]


@given(NUMBERS, NUMBERS)
@example(0.0, 5e-324)
@example(-2e-310, 3e-310)
def test_a_linear_axis_holds_its_range(a, b):
    axis = linear(min(a, b), max(a, b))
    assert axis.low <= min(a, b) + 1e-6 * abs(a - b)
    assert axis.high >= max(a, b) - 1e-6 * abs(a - b)
    assert 2 <= len(axis.ticks) <= 12
    assert all(0 <= tick.place <= 1 for tick in axis.ticks)


@given(POSITIVE, POSITIVE)
def test_a_logarithmic_axis_ascends_and_holds_its_top(a, b):
    axis = logarithmic(min(a, b), max(a, b))
    assert 0 < axis.low < axis.high
    assert axis.high >= max(a, b)
    places = [tick.place for tick in axis.ticks]
    assert 2 <= len(places) <= 30
    assert places == sorted(places)


def test_round_numbers():
    assert labels(linear(0.03, 2.4)) == ["0", "0.5", "1", "1.5", "2", "2.5"]
    assert labels(linear(0.31, 0.99, format_percent)) == ["20%", "40%", "60%", "80%", "100%"]
    assert labels(linear(0.004, 0.0456, format_duration)) == [
        "0 s", "10 ms", "20 ms", "30 ms", "40 ms", "50 ms",
    ]  # fmt: skip
    assert labels(spanning(0, 1_000_000)) == [
        "0", "200,000", "400,000", "600,000", "800,000", "1,000,000",
    ]  # fmt: skip
    assert labels(logarithmic(0.01, 10)) == ["0.01", "0.1", "1", "10"]


def test_one_value_has_an_axis_around_it():
    assert linear(3.0, 3.0).low < 3.0 < linear(3.0, 3.0).high
    assert linear(0.0, 0.0).place(np.array([0.0])).tolist() == [0.5]
    assert spanning(7, 7).low == 7
    assert logarithmic(5.0, 5.0).low < 5.0


def test_what_lies_beyond_an_axis_lies_at_its_end():
    axis = logarithmic(1e-300, 1.0)
    assert axis.place(np.array([1e-200, 100.0])).tolist() == [0.0, 1.0]


def test_a_logarithm_has_no_place_for_zero():
    places = logarithmic(0.1, 10).place(np.array([0.0, -1.0, 0.1, 1.0]))
    assert np.isnan(places[:2]).all()
    assert places[3] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("label", "tidied"),
    [("0.500", "0.5"), ("50.0%", "50%"), ("20.0 ms", "20 ms"), ("1,000", "1,000"), ("100", "100")],
)
def test_needless_zeros_are_dropped(label, tidied):
    assert tidy(label) == tidied


def test_numbers_that_lie_close_together_are_told_apart():
    names = [tick.label for tick in linear(1.3861, 1.3872).ticks]
    assert len(set(names)) == len(names)
    assert names[0] == "1.386"
    assert [tick.label for tick in linear(0, 1).ticks][-1] == "1"


def test_a_range_without_an_inside_is_widened():
    axis = logarithmic(9.999999999999196e299, 9.999999999999198e299)
    assert axis.low < 9e299
    assert axis.high > 1.5e300
