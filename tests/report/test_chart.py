"""Charts as plain values: which curves, where evaluations lie."""

import numpy as np
import pytest

import records
from lockstep.record.reader import read
from lockstep.report.chart import curves, overlaid


@pytest.fixture
def run(tmp_path):
    return read(records.write(tmp_path / "a", records.whole()))


def by_key(charts):
    return {chart.key: chart for chart in charts}


def test_loss_metrics_and_seconds(run):
    charts = by_key(curves(run))
    assert list(charts) == ["loss", "metric-accuracy", "seconds"]
    assert [(one.name, one.role) for one in charts["loss"].series] == [
        ("training", "line"), ("held out", "dots"),
    ]  # fmt: skip
    assert charts["loss"].log is not None
    assert charts["metric-accuracy"].log is None


def test_an_evaluation_lies_at_the_last_step_of_its_epoch(run):
    held_out = by_key(curves(run))["loss"].series[1].curve
    assert held_out.x.tolist() == [9, 19]
    assert held_out.mean.tolist() == [0.3, 0.25]


def test_a_peak_among_a_hundred_thousand_steps_is_in_the_chart(tmp_path):
    lines = [records.step(n, per_epoch=10**6, loss=1.0, ranks=None) for n in range(100_000)]
    lines[77_777]["loss"] = 50.0
    loss = by_key(curves(read(records.write(tmp_path, [records.HEADER, *lines]))))["loss"]
    curve = loss.series[0].curve
    assert len(curve) <= 400
    assert curve.high.max() == 50.0
    at = int(np.argmax(curve.high))
    assert curve.first[at] <= 77_777 <= curve.last[at]
    assert loss.linear.high >= 50.0


def test_a_loss_that_is_never_positive_has_no_log_scale(tmp_path):
    lines = [records.HEADER, *(records.step(n, loss=-1.0 - n) for n in range(5))]
    assert by_key(curves(read(records.write(tmp_path, lines))))["loss"].log is None


def test_steps_that_are_numbered_badly_are_counted(tmp_path):
    lines = [records.HEADER, *(records.step(0, loss=float(n)) for n in range(5))]
    loss = by_key(curves(read(records.write(tmp_path, lines))))["loss"]
    assert loss.series[0].curve.x.tolist() == [0, 1, 2, 3, 4]


def test_runs_keep_their_colours_in_every_chart(run, tmp_path):
    plain = [records.HEADER, *(records.step(n, metrics=None) for n in range(5))]
    other = read(records.write(tmp_path / "b", plain))
    charts = by_key(overlaid([other, run], ["other", "run"]))
    assert [(one.name, one.colour) for one in charts["loss"].series] == [("other", 0), ("run", 1)]
    assert [(one.name, one.colour) for one in charts["metric-accuracy"].series] == [("run", 1)]


def test_a_run_without_steps_has_no_charts(tmp_path):
    assert curves(read(records.write(tmp_path, [records.HEADER]))) == []
