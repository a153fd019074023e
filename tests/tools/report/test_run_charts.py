"""The charts of a run: which ones there are, and what they show."""

import numpy as np
import pytest

import records
from lockstep.record.reader import read_run
from lockstep.tools.report import run_charts


@pytest.fixture
def charts(tmp_path, monkeypatch):
    """Return a function that draws the charts of lines: (names, curves, axes) by key."""

    def draw(lines):
        drawn = []
        monkeypatch.setattr(
            run_charts, "draw_chart", lambda *given, **named: drawn.append(given[1:3])
        )
        found = run_charts.draw_run_charts(read_run(records.write(tmp_path, lines)))
        return {chart.key: (chart.names, *given) for chart, given in zip(found, drawn, strict=True)}

    return draw


def test_loss_metrics_and_seconds(charts):
    found = charts(records.whole())
    assert list(found) == ["loss", "metric-accuracy", "seconds"]
    names, (training, held_out), (x, y) = found["loss"]
    assert names == ["training", "held out"]
    assert (training.is_dotted, held_out.is_dotted) == (False, True)
    assert (x.low, x.high, y.is_log) == (0, 20, False)


def test_evaluations_are_at_the_last_step_of_their_epoch(charts):
    held_out = charts(records.whole())["loss"][1][1]
    assert held_out.x.tolist() == [9, 19]
    assert held_out.y.tolist() == [0.3, 0.25]


def test_a_peak_among_many_steps_is_kept(charts):
    lines = [records.step(n, per_epoch=10**6, loss=1.0, ranks=None) for n in range(20_000)]
    lines[7_777]["loss"] = 50.0
    _, (curve,), (_, y) = charts([records.HEADER, *lines])["loss"]
    assert len(curve.x) <= 400
    assert curve.high.max() == 50.0
    assert curve.x[np.argmax(curve.high)] == pytest.approx(7_777, abs=50)
    assert y.high >= 50.0


@pytest.mark.parametrize(("last", "is_log"), [(0.001, True), (0.1, False), (-0.001, False)])
def test_a_loss_that_falls_far_has_a_logarithmic_axis(charts, last, is_log):
    lines = [records.HEADER, *(records.step(n, loss=1.0) for n in range(4))]
    found = charts([*lines, records.step(4, loss=last)])
    assert found["loss"][2][1].is_log is is_log


def test_a_curve_of_many_steps_is_said_to_be_a_mean(charts):
    lines = [records.step(n, loss=1.0) for n in range(401)]
    assert charts([records.HEADER, *lines[:400]])["loss"][0] == ["training"]
    (name,) = charts([records.HEADER, *lines])["loss"][0]
    assert name == "training (mean and range of 2 steps)"


def test_round_numbers_of_steps_are_brief():
    steps = (0, 500, 9999, 10_000, 12_345, 250_000, 1_500_000, 1_000_025)
    assert [run_charts.format_step(step) for step in steps] == [
        "0", "500", "9,999", "10k", "12,345", "250k", "1.5M", "1,000,025",
    ]  # fmt: skip


def test_the_axis_of_steps_is_named(tmp_path):
    for chart in run_charts.draw_run_charts(read_run(records.write(tmp_path, records.whole()))):
        assert ">step</text>" in chart.svg


def test_steps_with_invalid_numbers_are_counted(charts):
    found = charts([records.HEADER, *(records.step(0, loss=float(n)) for n in range(5))])
    assert found["loss"][1][0].x.tolist() == [0, 1, 2, 3, 4]


def test_the_curve_of_a_resumed_run_continues(charts):
    steps, _ = charts(records.resumed())["loss"][1]
    assert steps.x.tolist() == list(range(20))
