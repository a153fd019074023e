"""Step comparison: correct contenders, and the interval of a median."""

from __future__ import annotations

import pytest

from benchmarks.step import comparison
from benchmarks.step.answers import LIMIT
from benchmarks.step.comparison import ALONE, measure_case
from benchmarks.step.contenders import CONTENDERS, Case
from benchmarks.step.pairs import median_interval

CASE = Case("tiny", "adamw", 6, 3)


@pytest.mark.parametrize(("number", "rank"), [(6, 1), (8, 1), (9, 2), (20, 6), (30, 10)])
def test_the_interval_has_the_ranks_of_the_sign_test(number, rank):
    values = [float(value) for value in range(number, 0, -1)]
    assert median_interval(values) == (rank, number + 1 - rank)


@pytest.mark.stress
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_contender_trains_the_same_model(ranks):
    names = list(CONTENDERS) if ranks == 2 else ["fsdp-lockstep", "trainer", "shared"]
    outcomes = {
        each.name: each for each in measure_case(CASE, names, ranks, 1e-3, 60.0, lambda text: None)
    }
    assert list(outcomes) == ([ALONE] if "copies" in names else []) + names
    for name, outcome in outcomes.items():
        assert not outcome.error, (name, outcome.error)
        assert len(outcome.times) >= comparison.MIN_CALLS
        assert outcome.times == sorted(outcome.times)
        assert outcome.times[0] > 0
        assert 0 <= outcome.rank_bytes <= outcome.host_bytes
        if name != ALONE and CONTENDERS[name].average:
            assert outcome.answer.error <= LIMIT
    assert outcomes["trainer"].answer.same
    assert outcomes["shared"].answer.same
    assert outcomes["trainer"].host_bytes > 0
