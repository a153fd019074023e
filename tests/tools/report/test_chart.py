"""Charts: downsampling that keeps every peak, axes, and drawings."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.formatting import format_duration, format_percent
from lockstep.tools.report.chart import Curve, downsample, draw_chart, linear_axis, log_axis
from lockstep.tools.report.picture import Area, Dot, Label, Line, Picture

VALUES = st.lists(
    st.floats(-1e6, 1e6) | st.sampled_from([np.nan, np.inf, -np.inf]), min_size=1, max_size=60
)


@given(VALUES, st.integers(1, 70))
def test_minimum_and_maximum_are_kept(values, buckets):
    y = np.array(values)
    found = downsample("y", np.arange(len(y), dtype=float), y, buckets)
    finite = y[np.isfinite(y)]
    if len(finite):
        assert np.nanmax(found.high) == finite.max()
        assert np.nanmin(found.low) == finite.min()
    else:
        assert np.isnan(found.y).all()


@given(VALUES)
def test_means_are_between_minimum_and_maximum(values):
    found = downsample("y", np.arange(len(values), dtype=float), np.array(values), 7)
    known = np.isfinite(found.y)
    assert (found.low[known] <= found.y[known]).all()
    assert (found.y[known] <= found.high[known]).all()


def test_non_finite_values_are_ignored():
    found = downsample("y", np.arange(4.0), np.array([-3.0, np.nan, 5.0, np.inf]), 2)
    assert found.high.tolist() == [-3.0, 5.0]
    assert found.low.tolist() == [-3.0, 5.0]
    assert found.y.tolist() == [-3.0, 5.0]


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
    assert labels(log_axis(0.01, 10)) == ["0.01", "0.1", "1", "10"]


def draw(*curves):
    """Return the shapes of curves on the axes 0 to 10 and 1 to 100 (logarithmic)."""
    picture = Picture(264, 124, "none", "test")
    axes = (linear_axis(0, 10), log_axis(1, 100))
    colors = ["red", "blue"][: len(curves)]
    draw_chart(picture, curves, axes, (0, 0, 264, 124), colors, "black", "gray")
    return [shape for shape in picture.shapes if getattr(shape, "stroke", "") != "gray"]


def test_the_name_of_an_axis_is_below_its_labels():
    picture = Picture(264, 142, "none", "test")
    axes = (linear_axis(0, 10), linear_axis(0, 1))
    draw_chart(picture, [curve([0, 1])], axes, (0, 0, 264, 142), ["red"], "black", "gray", "step")
    labels = [shape for shape in picture.shapes if isinstance(shape, Label)]
    (name,) = (label for label in labels if label.text == "step")
    assert (name.x, name.y) == (164, 136)
    assert max(label.y for label in labels if label is not name) == 118


def curve(y, low=None, high=None, is_dotted=False):
    y = np.array(y, float)
    x = np.arange(len(y), dtype=float)
    low, high = (y if part is None else np.array(part, float) for part in (low, high))
    return Curve("y", x, y, low, high, is_dotted)


def test_a_curve_is_a_line_in_its_band_interrupted_by_missing_values():
    shapes = draw(curve([1, 10, np.nan, 100], low=[-1, 1, np.nan, 100], high=[1, 100, np.nan, 100]))
    (area,) = (shape for shape in shapes if isinstance(shape, Area))
    (line,) = (shape for shape in shapes if isinstance(shape, Line))
    (dot,) = (shape for shape in shapes if isinstance(shape, Dot))
    assert [x for x, _ in line.points] == [64, 84]
    assert line.points[1][1] == 50
    assert len(area.points) == 4
    assert min(y for _, y in area.points) < 10, "the peak is visible"
    assert dot.x == 124


def test_evaluations_are_dots():
    shapes = draw(curve([1, 10, 100]), curve([1, 1, 1], is_dotted=True))
    assert [shape.fill for shape in shapes if isinstance(shape, Dot)] == ["blue"] * 3
