"""The race of pipelines: turns, the slowest rank, wrong answers found, every way right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.pipeline import race as racing
from benchmarks.pipeline.case import Case
from benchmarks.pipeline.race import CHECKED, Contender, Outcome, contenders, ideal, judge, race
from benchmarks.pipeline.ways import ALONE, COPIES, WAYS
from lockstep.errors import RankError
from lockstep.launcher import preload

CASE = Case("tiny", 4, 8, 32)


class Scripted:
    """A peer of two ranks whose steps last as long as it is told, in nanoseconds."""

    def __init__(self, log, name, times=(10**8, 3 * 10**8), cannot=""):
        self.log, self.name, self.times, self.cannot = log, name, times, cannot

    def ask(self, message):
        self.log.append((self.name, *message))
        if self.cannot:
            return [{}, {"cannot": self.cannot}]
        if "block" in message:
            return [{"times": [time] * message["block"]} for time in self.times]
        return [{"losses": []}, {"losses": [2.0, 1.0]}]


def scripted(log, name, **more):
    way = replace(WAYS["torch-gloo"], name=name)
    return Contender(way, Scripted(log, name, **more))


def quietly(text):
    pass


def test_contenders_take_turns_and_the_slowest_rank_counts():
    log = []
    field = [scripted(log, name) for name in (COPIES, "b", "d")]
    outcomes = race(field, replace(CASE, model="resnet50"), 3, quietly)
    blocks = [name[0] for name, what, *_ in log if what == "block"]
    assert "".join(blocks) == "cbdbdcdcb"
    assert [each.times for each in outcomes] == [[0.3] * 3] * 3
    assert not any(each.wrong for each in outcomes)
    assert log[-3:] == [(name, "drop") for name in (COPIES, "b", "d")]


def test_who_cannot_says_why_and_the_others_go_on():
    log = []
    field = [scripted(log, COPIES), scripted(log, "unable", cannot="no luck")]
    able, unable = race(field, CASE, 2, quietly)
    assert (unable.cannot, unable.times, unable.wrong) == ("no luck", [], "")
    assert len(able.times) >= 2


def test_wrong_losses_and_another_digest_are_found():
    def outcome(name, losses, digest=""):
        return Outcome(name, CASE, losses=losses, digest=digest)

    outcomes = [
        outcome(ALONE, []),
        outcome(COPIES, [2.0, 1.0]),
        outcome("near", [2.0, 1.001]),
        outcome("far", [2.0, 1.01]),
        outcome("none", []),
        outcome("ours", [2.0, 1.0], "aa"),
        outcome("same", [2.0, 1.0], "aa"),
        outcome("other", [2.0, 1.0], "bb"),
    ]
    judge(outcomes)
    assert [each.name for each in outcomes if each.wrong] == ["far", "none", "other"]


def test_an_ideal_pipeline_of_two_waits_for_one_micro_batch():
    assert [ideal(8.0, splits) for splits in (1, 2, 8)] == [8.0, 6.0, 4.5]


OURS = [name for name in WAYS if name.startswith("lockstep") or name == "driver"]
THEIRS = [name for name in WAYS if name not in (COPIES, *OURS)]


@pytest.mark.parametrize(("names", "splits"), [(THEIRS, (1, 4)), (OURS, (4,))])
def test_every_way_has_the_losses_of_one_process_and_ours_one_digest(monkeypatch, names, splits):
    monkeypatch.setattr(racing, "BLOCK", 0.01)
    preload.template(trains=True)
    with contenders(names, 60.0, quietly) as running:
        assert [one.name for one in running] == [ALONE, COPIES, *names]
        for each in splits:
            outcomes = race(running, replace(CASE, splits=each), 1, quietly)
            digests = [outcome.digest for outcome in outcomes if outcome.digest]
            assert len(digests) == (len(OURS) if names == OURS else 0)
            assert len(set(digests)) <= 1
            for outcome in outcomes:
                assert (outcome.cannot, outcome.wrong) == ("", ""), outcome.name
                assert len(outcome.losses) == (0 if outcome.name == ALONE else CHECKED)
                assert outcome.times == sorted(outcome.times)
                assert outcome.times[0] > 0


def leave(name, folder, peer, patience):
    """End at once."""
    raise SystemExit(3)


def test_a_rank_that_ends_ends_the_race(monkeypatch):
    monkeypatch.setattr(racing, "main", leave)
    with (
        pytest.raises(RankError, match=r"rank \d exited with status 3"),
        contenders(["torch-gloo"], 60.0, quietly),
    ):
        pass
