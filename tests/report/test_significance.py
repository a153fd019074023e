"""Significance of speed differences, with and without autocorrelation."""

import math
from pathlib import Path

import numpy as np
import pytest

import records
from lockstep.record.columns import Steps
from lockstep.record.reader import Run, read_run
from lockstep.report import significance
from lockstep.report.significance import autocorrelation_time, compare_speeds, step_times


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch):
    monkeypatch.setattr(significance, "NUM_RESAMPLES", 1000)


def steps(draw, count, memory, slower=0.0):
    """Return seconds of steps that remember one another by `memory` (AR(1)), with outliers."""
    shocks = draw.normal(size=count) * math.sqrt(1 - memory**2)
    values = np.empty(count)
    level = draw.normal()
    for at, shock in enumerate(shocks):
        level = memory * level + shock
        values[at] = level
    outliers = 2.0 * (draw.random(count) < 0.01)
    return 0.005 * np.exp(0.05 * values + slower + outliers)


def paced(seconds):
    """Return the times of a run with these seconds per step."""
    count = len(seconds)
    columns = {name: np.full(count, np.nan) for name in ("t", "epoch", "loss", "lr")}
    steps = Steps(
        step=np.arange(count, dtype=float), samples=np.ones(count), seconds=seconds,
        metrics={}, ranks=np.empty((count, 0, 4)), spread=np.empty((count, 0, 4)),
        slowest=np.empty((count, 0, 5)), **columns,
    )  # fmt: skip
    return step_times(Run(Path("x"), {}, steps))


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_equal_runs_rarely_differ_significantly(memory):
    draw = np.random.default_rng(1)
    called = sum(
        compare_speeds(
            paced(steps(draw, 600, memory)), paced(steps(draw, 600, memory))
        ).is_significant
        for _ in range(60)
    )
    assert called <= 8  # 5% of 60 are 3; more than 8 has a chance below 1%


def test_without_blocks_correlated_runs_would_differ(monkeypatch):
    """The purpose of the blocks: without them every other pair of equal runs would differ."""
    draw = np.random.default_rng(1)
    pairs = [(steps(draw, 200, 0.9), steps(draw, 200, 0.9)) for _ in range(20)]
    monkeypatch.setattr(significance, "autocorrelation_time", lambda values: 0.5)
    monkeypatch.setattr(significance, "MAX_BLOCKS", 200)
    assert sum(compare_speeds(paced(a), paced(b)).is_significant for a, b in pairs) > 6


def test_a_difference_of_three_per_cent_is_found():
    draw = np.random.default_rng(2)
    found = [
        compare_speeds(paced(steps(draw, 600, 0.5, 0.03)), paced(steps(draw, 600, 0.5)))
        for _ in range(10)
    ]
    assert sum(verdict.is_significant for verdict in found) >= 9
    assert np.median([verdict.ratio for verdict in found]) == pytest.approx(1.03, abs=0.01)


def test_the_autocorrelation_time_is_that_of_the_process():
    draw = np.random.default_rng(3)
    assert autocorrelation_time(draw.normal(size=5000)) == pytest.approx(1.0, abs=0.2)
    assert autocorrelation_time(steps(draw, 20000, 0.9)) == pytest.approx(
        19, rel=0.3
    )  # (1 + a) / (1 - a)
    assert autocorrelation_time(np.ones(50)) == 1.0
    assert autocorrelation_time(np.array([1.0, 2.0] * 50)) == 1.0  # ties share a rank


@pytest.mark.parametrize("count", [0, 1, 2, 5, 30])
def test_few_steps_allow_no_conclusion(count):
    values = np.full(count, 0.01)
    one = paced(values)
    verdict = compare_speeds(one, one)
    assert not verdict.is_significant
    assert verdict.is_known == (count >= 30)


def test_speed_is_samples_per_second(tmp_path):
    small = [records.step(n, samples=32, seconds=0.01, ranks=None) for n in range(100)]
    large = [records.step(n, samples=64, seconds=0.02, ranks=None) for n in range(100)]
    runs = [
        step_times(read_run(records.write(tmp_path / name, [records.HEADER, *lines])))
        for name, lines in (("small", small), ("large", large))
    ]
    assert runs[0].speed == pytest.approx(3200)
    assert not compare_speeds(*runs).is_significant


def test_warmup_steps_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(
        significance, "autocorrelation_time", lambda values: 0.5
    )  # every step its own block
    lines = [records.step(n, seconds=9.0 if n < 5 else 0.01, ranks=None) for n in range(100)]
    found = step_times(read_run(records.write(tmp_path, [records.HEADER, *lines])))
    assert found.blocks.max() < 1


def test_results_are_reproducible():
    draw = np.random.default_rng(4)
    one, two = paced(steps(draw, 200, 0.5)), paced(steps(draw, 200, 0.5))
    assert compare_speeds(one, two) == compare_speeds(one, two)
