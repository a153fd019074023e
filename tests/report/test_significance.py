"""Which run is faster: right about as often as it should be, also where steps remember."""

import math

import numpy as np
import pytest

import records
from lockstep.record.reader import read
from lockstep.report import significance as pacing
from lockstep.report.significance import Pace, block_medians, compare_paces, memory_of, pace


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch):
    monkeypatch.setattr(pacing, "DRAWS", 1000)


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


def paced(values):
    return Pace(float(np.median(values)), float(np.median(values)), block_medians(values))


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_equal_runs_are_seldom_called_different(memory):
    draw = np.random.default_rng(1)
    called = sum(
        compare_paces(paced(steps(draw, 600, memory)), paced(steps(draw, 600, memory))).significant
        for _ in range(60)
    )
    assert called <= 8  # 5% of 60 are 3; more than 8 has a chance below 1%


def test_taking_steps_for_independent_would_see_differences_everywhere(monkeypatch):
    """What the blocks are for: without them every other pair of equal runs would differ."""
    draw = np.random.default_rng(1)
    pairs = [(steps(draw, 200, 0.9), steps(draw, 200, 0.9)) for _ in range(20)]
    monkeypatch.setattr(pacing, "memory_of", lambda values: 0.5)
    monkeypatch.setattr(pacing, "BLOCKS", 200)
    assert sum(compare_paces(paced(a), paced(b)).significant for a, b in pairs) > 6


def test_a_difference_of_three_per_cent_is_found():
    draw = np.random.default_rng(2)
    found = [
        compare_paces(paced(steps(draw, 600, 0.5, 0.03)), paced(steps(draw, 600, 0.5)))
        for _ in range(10)
    ]
    assert sum(verdict.significant for verdict in found) >= 9
    assert np.median([verdict.ratio for verdict in found]) == pytest.approx(1.03, abs=0.01)


def test_memory_is_about_that_of_the_process():
    draw = np.random.default_rng(3)
    assert memory_of(draw.normal(size=5000)) == pytest.approx(1.0, abs=0.2)
    assert memory_of(steps(draw, 20000, 0.9)) == pytest.approx(19, rel=0.3)  # (1 + a) / (1 - a)
    assert memory_of(np.ones(50)) == 1.0
    assert memory_of(np.array([1.0, 2.0] * 50)) == 1.0  # ties share a rank


@pytest.mark.parametrize("count", [0, 1, 2, 5, 30])
def test_few_steps_say_nothing(count):
    values = np.full(count, 0.01)
    one = Pace(0.01, 0.01, block_medians(values) if count else values)
    verdict = compare_paces(one, one)
    assert not verdict.significant
    assert verdict.known == (count >= 30)


def test_speed_counts_samples_not_steps(tmp_path):
    small = [records.step(n, samples=32, seconds=0.01, ranks=None) for n in range(100)]
    large = [records.step(n, samples=64, seconds=0.02, ranks=None) for n in range(100)]
    runs = [
        pace(read(records.write(tmp_path / name, [records.HEADER, *lines])))
        for name, lines in (("small", small), ("large", large))
    ]
    assert runs[0].speed == pytest.approx(3200)
    assert not compare_paces(*runs).significant


def test_warm_up_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(pacing, "memory_of", lambda values: 0.5)  # every step its own block
    lines = [records.step(n, seconds=9.0 if n < 5 else 0.01, ranks=None) for n in range(100)]
    found = pace(read(records.write(tmp_path, [records.HEADER, *lines])))
    assert found.blocks.max() < 1


def test_the_same_question_has_the_same_answer():
    draw = np.random.default_rng(4)
    one, two = paced(steps(draw, 200, 0.5)), paced(steps(draw, 200, 0.5))
    assert compare_paces(one, two) == compare_paces(one, two)
