"""Which rank failed first, and in which words. Outcomes by hand."""

from __future__ import annotations

import pytest

from lockstep.launcher.verdict import Outcome, first_failure, rank_error, spoken

LOST = "[pair.cc:553] Connection closed by peer [127.0.0.1]:24473"


def raised(rank, when, message="boo", kind="ValueError", plain=False):
    error = {"time": when, "type": kind, "message": message, "traceback": "Traceback ...",
             "where": "train.py:3", "plain": plain}  # fmt: skip
    return Outcome(rank, status=1, when=when + 1, error=error)


def test_the_earliest_failure_wins_by_the_moment_it_was_raised():
    outcomes = [raised(0, 5.0), Outcome(1, status=3, when=4.5), raised(2, 4.0)]
    assert first_failure(outcomes).rank == 2
    error = rank_error(outcomes)
    assert str(error) == "rank 2 raised ValueError: boo (train.py:3)"
    assert error.__notes__ == ["rank 2:\nTraceback ..."]
    assert (error.rank, error.status) == (2, 1)


def test_a_lost_connection_is_never_the_cause_of_a_death():
    outcomes = [raised(0, 1.0, LOST), Outcome(1, status=-9, when=2.0), raised(2, 1.5, LOST)]
    assert str(rank_error(outcomes)) == "rank 1 was killed by SIGKILL"
    assert rank_error(outcomes).status == -9


def test_what_is_known_of_a_signal_goes_along():
    outcome = Outcome(1, status=-9, when=2.0, hint="; the kernel's log says out of memory")
    expected = "rank 1 was killed by SIGKILL; the kernel's log says out of memory"
    assert str(rank_error([outcome])) == expected


def test_ranks_that_the_launcher_ended_have_not_failed():
    assert first_failure([Outcome(0, status=-15, ended_by_us=True), Outcome(1, status=0)]) is None


def test_who_returned_early_is_the_cause_of_a_lost_connection():
    outcomes = [raised(0, 1.0, LOST), Outcome(1, status=0, when=2.0), Outcome(2)]
    assert str(rank_error(outcomes)) == (
        "rank 1 returned while rank 0 still waited in a collective (train.py:3)"
    )


def test_who_returned_without_joining_is_named():
    outcomes = [Outcome(0, awaits=(1, 3)), Outcome(1, status=0), Outcome(2, awaits=(1, 3))]
    assert str(rank_error([*outcomes, Outcome(3)])) == (
        "rank 1 returned without joining the world, while ranks 0 and 2 waited in "
        "lockstep.init(): every rank must call it"
    )
    assert rank_error([Outcome(0, awaits=(1,)), Outcome(1)]) is None


def test_a_sentence_of_locksteps_own_needs_no_traceback():
    error = rank_error([raised(1, 1.0, "there is no data", plain=True)])
    assert str(error) == "rank 1 failed: there is no data"
    assert not hasattr(error, "__notes__")


def test_a_sentence_that_names_its_rank_stands_alone():
    message = "rank 0, step 3, micro-batch 1: the loss is nan"
    assert str(rank_error([raised(1, 1.0, message, plain=True)])) == message
    assert str(rank_error([raised(1, 1.0, "ranks differ", plain=True)])).startswith("rank 1 failed")


def test_only_the_first_line_of_a_long_message_is_in_the_sentence():
    assert (
        str(rank_error([raised(0, 1.0, "one\ntwo")]))
        == "rank 0 raised ValueError: one (train.py:3)"
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([2], "rank 2"), ([0, 2], "ranks 0 and 2"), ([0, 1, 2], "ranks 0, 1 and 2")],
)
def test_ranks_in_words(ranks, words):
    assert spoken(ranks) == words
