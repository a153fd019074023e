"""Pipeline comparison: wrong answers are found, and the contenders are correct."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.pipeline import comparison
from benchmarks.pipeline.case import Case
from benchmarks.pipeline.comparison import (
    CHECKED,
    Outcome,
    judge,
    measure_case,
    start_participants,
)
from benchmarks.pipeline.contenders import ALONE, CONTENDERS, COPIES
from lockstep.launcher.fork_server import get_fork_server

CASE = Case("tiny", 4, 8, 32)


def quietly(text):
    pass


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
