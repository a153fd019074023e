"""Axes cover their range and have round numbers as ticks."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.formatting import format_duration, format_percent
from lockstep.report.axes import exact_axis, linear_axis, log_axis

NUMBERS = st.floats(-1e12, 1e12)
POSITIVE = st.floats(1e-300, 1e300)


def labels(axis):
    return [tick.label for tick in axis.ticks]


@given(NUMBERS, NUMBERS)
@example(0.0, 5e-324)
@example(-2e-310, 3e-310)
def test_a_linear_axis_covers_its_range(a, b):
    axis = linear_axis(min(a, b), max(a, b))
    assert axis.low <= min(a, b) + 1e-6 * abs(a - b)
    assert axis.high >= max(a, b) - 1e-6 * abs(a - b)
    assert 2 <= len(axis.ticks) <= 12
    assert all(0 <= tick.position <= 1 for tick in axis.ticks)


@given(POSITIVE, POSITIVE)
def test_a_logarithmic_axis_ascends_and_covers_its_maximum(a, b):
    axis = log_axis(min(a, b), max(a, b))
    assert 0 < axis.low < axis.high
    assert axis.high >= max(a, b)
    places = [tick.position for tick in axis.ticks]
    assert 2 <= len(places) <= 30
    assert places == sorted(places)


def test_round_numbers():
    assert labels(linear_axis(0.03, 2.4)) == ["0", "0.5", "1", "1.5", "2", "2.5"]
    assert labels(linear_axis(0.31, 0.99, format_percent)) == ["20%", "40%", "60%", "80%", "100%"]
    assert labels(linear_axis(0.004, 0.0456, format_duration)) == [
        "0 s", "10 ms", "20 ms", "30 ms", "40 ms", "50 ms",
    ]  # fmt: skip
    assert labels(exact_axis(0, 1_000_000)) == [
        "0", "200,000", "400,000", "600,000", "800,000", "1,000,000",
    ]  # fmt: skip
    assert labels(log_axis(0.01, 10)) == ["0.01", "0.1", "1", "10"]


def test_a_single_value_is_within_its_axis():
    assert linear_axis(3.0, 3.0).low < 3.0 < linear_axis(3.0, 3.0).high
    assert linear_axis(0.0, 0.0).positions(np.array([0.0])).tolist() == [0.5]
    assert exact_axis(7, 7).low == 7
    assert log_axis(5.0, 5.0).low < 5.0


def test_values_beyond_an_axis_are_at_its_ends():
    axis = log_axis(1e-300, 1.0)
    assert axis.positions(np.array([1e-200, 100.0])).tolist() == [0.0, 1.0]


def test_zero_has_no_position_on_a_logarithmic_axis():
    places = log_axis(0.1, 10).positions(np.array([0.0, -1.0, 0.1, 1.0]))
    assert np.isnan(places[:2]).all()
    assert places[3] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("high", "label", "last"),
    [
        (0.5, "{:.3f}", "0.5"),
        (0.5, "{:.1%}", "50%"),
        (20, "{:.1f} ms", "20 ms"),
        (1e3, "{:,.0f}", "1,000"),
    ],
)
def test_trailing_zeros_are_removed(high, label, last):
    assert labels(linear_axis(0, high, label.format))[-1] == last


def test_ticks_that_are_close_have_different_labels():
    names = [tick.label for tick in linear_axis(1.3861, 1.3872).ticks]
    assert len(set(names)) == len(names)
    assert names[0] == "1.386"
    assert [tick.label for tick in linear_axis(0, 1).ticks][-1] == "1"


def test_an_empty_range_is_widened():
    axis = log_axis(9.999999999999196e299, 9.999999999999198e299)
    assert axis.low < 9e299
    assert axis.high > 1.5e300
