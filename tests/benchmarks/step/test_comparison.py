"""Step comparison: rotation, slowest rank, errors."""

from __future__ import annotations

import pytest

from benchmarks.step import comparison
from benchmarks.step.answers import LIMIT
from benchmarks.step.comparison import ALONE, Outcome, StepParticipant, measure_case, take_turns
from benchmarks.step.contenders import CONTENDERS, Case
from lockstep.kernel.errors import RankError

CASE = Case("tiny", "adamw", 6, 3)


class Scripted:
    """A peer of two ranks whose steps last as long as it is told, in nanoseconds."""

    def __init__(self, log, name, times=(10**8, 3 * 10**8), error=""):
        self.log, self.name, self.times, self.error = log, name, times, error

    def ask(self, message):
        self.log.append(self.name)
        if self.error:
            return [{"times": [1]}, {"error": self.error}]
        return [{"times": [time] * message["block"]} for time in self.times if time]


def contender(log, name, **more):
    contender = CONTENDERS["copies"]
    return StepParticipant(Outcome(name, CASE, 2), contender, Scripted(log, name, **more))


def test_contenders_take_turns_until_each_has_had_its_time():
    log = []
    field = [contender(log, name) for name in "abc"]
    take_turns(field, 0.1, lambda text: None)
    assert log[:9] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert len(log) == 3 * comparison.MIN_CALLS
    assert field[0].outcome.median == 0.3  # the slower of two ranks


def test_unsupported_contender_reports_error_and_others_continue():
    log = []
    able, unable = contender(log, "able"), contender(log, "unable", error="no luck")
    take_turns([able, unable], 0.1, lambda text: None)
    assert (unable.outcome.error, unable.outcome.times) == ("no luck", [])
    assert len(able.outcome.times) == comparison.MIN_CALLS


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


def test_exited_rank_ends_the_measurement(monkeypatch):
    monkeypatch.setattr(comparison, "main", leave)
    with pytest.raises(RankError, match=r"rank \d exited with status 3"):
        measure_case(CASE, ["trainer"], 2, 1e-3, 60.0, lambda text: None)


def leave(name, folder, key, timeout):
    """End at once."""
    raise SystemExit(3)
