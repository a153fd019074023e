"""The race: contenders take turns, the slowest rank counts, who cannot says why."""

from __future__ import annotations

import pytest

from benchmarks.step import race as racing
from benchmarks.step.answers import LIMIT
from benchmarks.step.race import ALONE, Contender, Outcome, race, take_turns
from benchmarks.step.ways import WAYS, Case
from lockstep.errors import RankError

CASE = Case("tiny", "adamw", 6, 3)


class Scripted:
    """A peer of two ranks whose steps last as long as it is told, in nanoseconds."""

    def __init__(self, log, name, times=(10**8, 3 * 10**8), cannot=""):
        self.log, self.name, self.times, self.cannot = log, name, times, cannot

    def ask(self, message):
        self.log.append(self.name)
        if self.cannot:
            return [{"times": [1]}, {"cannot": self.cannot}]
        return [{"times": [time] * message["block"]} for time in self.times if time]


def contender(log, name, **more):
    way = WAYS["copies"]
    return Contender(Outcome(name, CASE, 2), way, Scripted(log, name, **more))


def test_contenders_take_turns_until_each_has_had_its_time():
    log = []
    field = [contender(log, name) for name in "abc"]
    take_turns(field, 0.1, lambda text: None)
    assert log[:9] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert len(log) == 3 * racing.FEWEST
    assert field[0].outcome.median == 0.3  # the slower of two ranks


def test_who_cannot_says_why_and_the_others_go_on():
    log = []
    able, unable = contender(log, "able"), contender(log, "unable", cannot="no luck")
    take_turns([able, unable], 0.1, lambda text: None)
    assert (unable.outcome.cannot, unable.outcome.times) == ("no luck", [])
    assert len(able.outcome.times) == racing.FEWEST


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_way_trains_the_same_model(ranks):
    names = list(WAYS) if ranks == 2 else ["fsdp-lockstep", "trainer", "shared"]
    outcomes = {each.name: each for each in race(CASE, names, ranks, 1e-3, 60.0, lambda text: None)}
    assert list(outcomes) == ([ALONE] if "copies" in names else []) + names
    for name, outcome in outcomes.items():
        assert not outcome.cannot, (name, outcome.cannot)
        assert len(outcome.times) >= racing.FEWEST
        assert outcome.times == sorted(outcome.times)
        assert outcome.times[0] > 0
        assert 0 <= outcome.rank_bytes <= outcome.host_bytes
        if name != ALONE and WAYS[name].average:
            assert outcome.answer.error <= LIMIT
    assert outcomes["trainer"].answer.same
    assert outcomes["shared"].answer.same
    assert outcomes["trainer"].host_bytes > 0


def test_a_rank_that_ends_ends_the_race(monkeypatch):
    monkeypatch.setattr(racing, "main", leave)
    with pytest.raises(RankError, match=r"rank \d exited with status 3"):
        race(CASE, ["trainer"], 2, 1e-3, 60.0, lambda text: None)


def leave(name, folder, peer, patience):
    """End at once."""
    raise SystemExit(3)
