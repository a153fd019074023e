"""Pipeline comparison: rotation, slowest rank, wrong answers, correct contenders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.pipeline import comparison
from benchmarks.pipeline.case import Case
from benchmarks.pipeline.comparison import (
    CHECKED,
    Outcome,
    PipelineParticipant,
    ideal,
    judge,
    measure_case,
    start_participants,
)
from benchmarks.pipeline.contenders import ALONE, CONTENDERS, COPIES
from lockstep.kernel.errors import RankError
from lockstep.launcher.fork_server import get_fork_server

CASE = Case("tiny", 4, 8, 32)


class Scripted:
    """A peer of two ranks whose steps last as long as it is told, in nanoseconds."""

    def __init__(self, log, name, times=(10**8, 3 * 10**8), error=""):
        self.log, self.name, self.times, self.error = log, name, times, error

    def ask(self, message):
        self.log.append((self.name, *message))
        if self.error:
            return [{}, {"error": self.error}]
        if "block" in message:
            return [{"times": [time] * message["block"]} for time in self.times]
        return [{"losses": []}, {"losses": [2.0, 1.0]}]


def scripted(log, name, **more):
    contender = replace(CONTENDERS["torch-gloo"], name=name)
    return PipelineParticipant(contender, Scripted(log, name, **more))


def quietly(text):
    pass


def test_contenders_take_turns_and_the_slowest_rank_counts():
    log = []
    field = [scripted(log, name) for name in (COPIES, "b", "d")]
    outcomes = measure_case(field, replace(CASE, model="resnet50"), 3, quietly)
    blocks = [name[0] for name, what, *_ in log if what == "block"]
    assert "".join(blocks) == "cbdbdcdcb"
    assert [each.times for each in outcomes] == [[0.3] * 3] * 3
    assert not any(each.wrong for each in outcomes)
    assert log[-3:] == [(name, "drop") for name in (COPIES, "b", "d")]


def test_unsupported_contender_reports_error_and_others_continue():
    log = []
    field = [scripted(log, COPIES), scripted(log, "unable", error="no luck")]
    able, unable = measure_case(field, CASE, 2, quietly)
    assert (unable.error, unable.times, unable.wrong) == ("no luck", [], "")
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


OURS = [name for name in CONTENDERS if name.startswith("lockstep") or name == "driver"]
THEIRS = [name for name in CONTENDERS if name not in (COPIES, *OURS)]


@pytest.mark.parametrize(
    ("names", "splits"), [pytest.param(THEIRS, (1, 4), marks=pytest.mark.stress), (OURS, (4,))]
)
def test_every_contender_has_correct_losses_and_ours_share_a_digest(monkeypatch, names, splits):
    monkeypatch.setattr(comparison, "BLOCK", 0.01)
    get_fork_server(for_training=True)
    with start_participants(names, 60.0, quietly) as running:
        assert [one.name for one in running] == [ALONE, COPIES, *names]
        for each in splits:
            outcomes = measure_case(running, replace(CASE, splits=each), 1, quietly)
            digests = [outcome.digest for outcome in outcomes if outcome.digest]
            assert len(digests) == (len(OURS) if names == OURS else 0)
            assert len(set(digests)) <= 1
            for outcome in outcomes:
                assert (outcome.error, outcome.wrong) == ("", ""), outcome.name
                assert len(outcome.losses) == (0 if outcome.name == ALONE else CHECKED)
                assert outcome.times == sorted(outcome.times)
                assert outcome.times[0] > 0


def leave(name, folder, key, timeout):
    """End at once."""
    raise SystemExit(3)


def test_exited_rank_ends_the_measurement(monkeypatch):
    monkeypatch.setattr(comparison, "main", leave)
    with (
        pytest.raises(RankError, match=r"rank \d exited with status 3"),
        start_participants(["torch-gloo"], 60.0, quietly),
    ):
        pass
