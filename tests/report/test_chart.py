"""Charts as plain values, and downsampling, which keeps every peak."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import records
from lockstep.record.reader import read_run
from lockstep.report.chart import comparison_charts, downsample, run_charts


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


def test_runs_keep_their_colors_in_every_chart(run, tmp_path):
    plain = [records.HEADER, *(records.step(n, metrics=None) for n in range(5))]
    other = read_run(records.write(tmp_path / "b", plain))
    charts = by_key(comparison_charts([other, run], ["other", "run"]))
    assert [(one.name, one.color) for one in charts["loss"].series] == [("other", 0), ("run", 1)]
    assert [(one.name, one.color) for one in charts["metric-accuracy"].series] == [("run", 1)]


def test_a_run_without_steps_has_no_charts(tmp_path):
    assert run_charts(read_run(records.write(tmp_path, [records.HEADER]))) == []


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


def test_few_values_are_unchanged():
    x, y = np.array([3.0, 5.0]), np.array([1.0, 2.0])
    found = downsample(x, y, 400)
    assert not found.is_downsampled
    assert found.mean.tolist() == y.tolist()
    assert found.x.tolist() == x.tolist()


def test_an_empty_curve_stays_empty():
    assert len(downsample(np.empty(0), np.empty(0), 400)) == 0


def test_numbers_of_positions_and_values_must_match():
    with pytest.raises(ValueError, match="2 positions for 1 values"):
        downsample(np.zeros(2), np.zeros(1), 4)
