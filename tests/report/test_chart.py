"""Charts as plain values: curves, downsampling that keeps every peak, and axes."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import records
from lockstep.formatting import format_duration, format_percent
from lockstep.record.reader import read_run
from lockstep.tools.report.chart import (
    downsample,
    exact_axis,
    linear_axis,
    log_axis,
    run_charts,
)


@pytest.fixture
def run(tmp_path):
    return read_run(records.write(tmp_path / "a", records.whole()))


def by_key(charts):
    return {chart.key: chart for chart in charts}


def test_loss_metrics_and_seconds(run):
    charts = by_key(run_charts(run))
    assert list(charts) == ["loss", "metric-accuracy", "seconds"]
    assert [(one.name, one.role) for one in charts["loss"].series] == [
        ("training", "line"), ("held out", "dots"),
    ]  # fmt: skip
    assert charts["loss"].log is not None
    assert charts["metric-accuracy"].log is None


def test_evaluations_are_at_the_last_step_of_their_epoch(run):
    held_out = by_key(run_charts(run))["loss"].series[1].curve
    assert held_out.x.tolist() == [9, 19]
    assert held_out.mean.tolist() == [0.3, 0.25]


def test_a_peak_among_a_hundred_thousand_steps_is_kept(tmp_path):
    lines = [records.step(n, per_epoch=10**6, loss=1.0, ranks=None) for n in range(100_000)]
    lines[77_777]["loss"] = 50.0
    loss = by_key(run_charts(read_run(records.write(tmp_path, [records.HEADER, *lines]))))["loss"]
    curve = loss.series[0].curve
    assert len(curve) <= 400
    assert curve.high.max() == 50.0
    at = int(np.argmax(curve.high))
    assert curve.first[at] <= 77_777 <= curve.last[at]
    assert loss.linear.high >= 50.0


def test_a_loss_without_positive_values_has_no_log_scale(tmp_path):
    lines = [records.HEADER, *(records.step(n, loss=-1.0 - n) for n in range(5))]
    assert by_key(run_charts(read_run(records.write(tmp_path, lines))))["loss"].log is None


def test_steps_with_invalid_numbers_are_counted(tmp_path):
    lines = [records.HEADER, *(records.step(0, loss=float(n)) for n in range(5))]
    loss = by_key(run_charts(read_run(records.write(tmp_path, lines))))["loss"]
    assert loss.series[0].curve.x.tolist() == [0, 1, 2, 3, 4]


VALUES = st.lists(
    st.floats(-1e6, 1e6) | st.sampled_from([np.nan, np.inf, -np.inf]), min_size=1, max_size=60
)


@given(VALUES, st.integers(1, 70))
def test_minimum_and_maximum_are_kept(values, buckets):
    y = np.array(values)
    found = downsample(np.arange(len(y), dtype=float), y, buckets)
    finite = y[np.isfinite(y)]
    if len(finite):
        assert np.nanmax(found.high) == finite.max()
        assert np.nanmin(found.low) == finite.min()
    else:
        assert np.isnan(found.mean).all()


@given(VALUES, st.integers(1, 70))
def test_buckets_cover_all_positions(values, buckets):
    x = np.arange(len(values), dtype=float)
    found = downsample(x, np.array(values), buckets)
    assert len(found) == min(buckets, len(x))
    sizes = found.last - found.first + 1
    assert sizes.sum() == len(x)
    assert sizes.max() - sizes.min() <= 1
    assert (found.first[1:] == found.last[:-1] + 1).all()


@given(VALUES)
def test_means_are_between_minimum_and_maximum(values):
    found = downsample(np.arange(len(values), dtype=float), np.array(values), 7)
    known = np.isfinite(found.mean)
    assert (found.low[known] <= found.mean[known]).all()
    assert (found.mean[known] <= found.high[known]).all()


def test_non_finite_values_are_ignored():
    found = downsample(np.arange(4.0), np.array([-3.0, np.nan, 5.0, np.inf]), 2)
    assert found.high.tolist() == [-3.0, 5.0]
    assert found.low.tolist() == [-3.0, 5.0]
    assert found.mean.tolist() == [-3.0, 5.0]


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


def test_the_steps_at_which_a_run_was_resumed_are_marked(tmp_path):
    loss, *others = run_charts(read_run(records.write(tmp_path / "a", records.resumed())))
    assert [mark.label for mark in loss.marks] == ["resumed at step 12", "resumed at step 16"]
    assert [mark.position for mark in loss.marks] == pytest.approx([12 / 19, 16 / 19])
    assert not any(chart.marks for chart in others)
    (steps,) = (series.curve for series in loss.series if series.role == "line")
    assert steps.x.tolist() == list(range(20)), "the curve continues"
