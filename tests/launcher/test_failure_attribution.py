"""Which rank failed first, and why, for outcomes made by hand."""

from __future__ import annotations

import pytest

from lockstep.launcher import failure_attribution
from lockstep.launcher.failure_attribution import (
    Outcome,
    describe_own_failure,
    explain_sigkill,
    find_first_failure,
    find_same_failures,
    make_rank_error,
    make_report,
)


def raised(rank, when, message="boo", kind="ValueError", plain=False, **fields):
    error = make_report(kind, message) | {"time": when, "traceback": "Traceback ...",
                                          "where": "train.py:3", "plain": plain}  # fmt: skip
    return Outcome(rank, status=1, when=when + 1, error=error | fields)


def test_the_failure_that_was_raised_first_is_the_cause():
    outcomes = [raised(0, 5.0), Outcome(1, status=3, when=4.5), raised(2, 4.0)]
    assert find_first_failure(outcomes).rank == 2
    error = make_rank_error(outcomes)
    assert str(error) == "rank 2 raised ValueError: boo (train.py:3)"
    assert error.__notes__ == ["rank 2:\nTraceback ..."]
    assert (error.rank, error.status) == (2, 1)


def test_a_lost_connection_is_never_the_cause_of_a_death():
    lost = [raised(rank, 1.0 + rank / 4, "its connection", code="lost") for rank in (0, 2)]
    outcomes = [lost[0], Outcome(1, status=-9, when=2.0), lost[1]]
    assert str(make_rank_error(outcomes)) == "rank 1 was killed by SIGKILL"
    assert make_rank_error(outcomes).status == -9


def test_a_hint_follows_the_signal():
    outcome = Outcome(1, status=-9, when=2.0, hint="; this control group ran out of memory")
    expected = "rank 1 was killed by SIGKILL; this control group ran out of memory"
    assert str(make_rank_error([outcome])) == expected


def test_ranks_that_the_launcher_ended_have_not_failed():
    assert (
        find_first_failure([Outcome(0, status=-15, was_terminated=True), Outcome(1, status=0)])
        is None
    )


def test_a_rank_that_returned_early_is_the_cause_of_a_lost_connection():
    outcomes = [raised(0, 1.0, "?", code="lost"), Outcome(1, status=0, when=2.0), Outcome(2)]
    assert str(make_rank_error(outcomes)) == (
        "rank 1 returned while rank 0 still waited in a collective (train.py:3)"
    )


def test_a_tag_without_a_receive_is_named_with_a_rank_that_returned():
    hint = "; a message with tag 1 arrived from it but no receive was posted for it"
    lost = raised(0, 1.0, code="lost", operation="recv from rank 1 (tag 2)", hint=hint)
    outcomes = [lost, Outcome(1, status=0, when=2.0)]
    assert str(make_rank_error(outcomes)) == (
        f"rank 1 returned while rank 0 still waited in recv from rank 1 (tag 2) (train.py:3){hint}"
    )


def test_errors_of_the_backend_are_the_same_whichever_rank_they_begin_with():
    calls = "the ranks of group default disagree in call #1: rank 0 called barrier; rank 1 called"
    of_backend = {"kind": "BackendError", "plain": True, "code": "communication"}
    outcomes = [raised(rank, 1.0 + rank, f"rank {rank}: {calls}", **of_backend) for rank in (0, 1)]
    assert find_same_failures(outcomes, outcomes[0]) == outcomes
    assert describe_own_failure(outcomes, outcomes[0]) == f"train.py:3: {calls}"
    assert str(make_rank_error(outcomes)) == f"rank 0: {calls}"
    # A rank that returned explains another's error better than that error.
    lost = raised(0, 1.0, **of_backend | {"code": "lost"}, operation="barrier #2")
    assert describe_own_failure([lost, Outcome(1, status=0, when=2.0)], lost) == (
        "rank 1 returned while rank 0 still waited in barrier #2 (train.py:3)"
    )


def test_a_rank_that_returned_without_joining_is_named():
    outcomes = [
        Outcome(0, waiting_for=(1, 3)),
        Outcome(1, status=0),
        Outcome(2, waiting_for=(1, 3)),
    ]
    assert str(make_rank_error([*outcomes, Outcome(3)])) == (
        "rank 1 returned without joining the world, while ranks 0 and 2 waited in "
        "lockstep.init(): every rank must call it"
    )
    assert make_rank_error([Outcome(0, waiting_for=(1,)), Outcome(1)]) is None


def test_an_error_of_lockstep_is_joined_over_the_ranks_that_raised_it():
    def own(rank: int, message: str, where: str = "train.py:3") -> Outcome:
        outcome = raised(rank, 1.0, message, plain=True)
        outcome.error["where"] = where
        return outcome

    def told(*outcomes: Outcome) -> tuple[list[int], str]:
        same = find_same_failures(outcomes, outcomes[0])
        return [each.rank for each in same], describe_own_failure(outcomes, outcomes[0])

    assert told(own(0, "no data"), own(1, "no data")) == ([0, 1], "train.py:3: no data")
    assert told(own(0, "no data"), Outcome(1)) == ([0], "train.py:3: rank 0 failed: no data")
    late = own(1, "rank 1: too late")
    assert told(own(0, "rank 0: too late"), late) == ([0, 1], "train.py:3: rank 0: too late")
    bare = ["rank 0, step 2, micro-batch 0: no loss", "rank 1, step 2, micro-batch 2: no loss"]
    assert told(own(0, bare[0]), own(1, bare[1])) == ([0, 1], f"train.py:3: {bare[0]}")
    assert told(own(0, bare[0]), own(1, f"{bare[1]} at all"))[0] == [0]
    assert told(own(0, "no loss in 0 on 0"), own(1, "no loss in 2 on 1"))[0] == [0, 1]
    of_rank_1 = "rank 1, step 3: the loss is nan"  # which every rank raises
    assert told(own(0, of_rank_1), own(1, of_rank_1)) == ([0, 1], f"train.py:3: {of_rank_1}")
    assert told(own(0, "no data", ""), own(1, "no data", "")) == ([0, 1], "no data")
    assert told(own(0, "differ"), own(1, "differ", "train.py:4"), own(2, "differ")) == (
        [0, 1, 2], "train.py:3 on ranks 0 and 2, train.py:4 on rank 1: differ",
    )  # fmt: skip
    assert find_same_failures([raised(0, 1.0, "no")], raised(0, 1.0, "no")) == []


def test_errors_of_lockstep_without_frames_of_the_user_have_no_note():
    outcome = raised(1, 1.0, "there is no data", plain=True)
    assert make_rank_error([outcome]).__notes__ == ["rank 1:\nTraceback ..."]
    outcome.error["traceback"] = ""
    error = make_rank_error([outcome])
    assert str(error) == "rank 1 failed: there is no data"
    assert not hasattr(error, "__notes__")


def test_a_message_that_begins_with_a_rank_gets_no_prefix():
    message = "rank 0, step 3, micro-batch 1: the loss is nan"
    assert str(make_rank_error([raised(1, 1.0, message, plain=True)])) == message
    assert str(make_rank_error([raised(1, 1.0, "ranks differ", plain=True)])).startswith(
        "rank 1 failed"
    )


def test_the_error_has_only_the_first_line_of_a_long_message():
    assert (
        str(make_rank_error([raised(0, 1.0, "one\ntwo")]))
        == "rank 0 raised ValueError: one (train.py:3)"
    )


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [(3, 4, "; this control group ran out of memory"), (3, 3, ""), (None, 4, "")],
)
def test_sigkill_is_explained_if_memory_ran_out(monkeypatch, before, now, words):
    monkeypatch.setattr(failure_attribution, "count_oom_kills", lambda: now)
    assert explain_sigkill(before) == words


def member(number, rank, **fields):
    return Outcome(number, noun="member", rank_in_world=rank, **fields)


def test_members_of_an_elastic_run_are_not_taken_for_ranks():
    """Their own messages name ranks, which the members have in a round."""
    killed = member(4, 0, status=-9, when=1.0)
    done = member(5, 1, status=0, when=2.0)
    assert str(make_rank_error([killed, done])) == "member 4 was killed by SIGKILL"
    waiting = member(6, 2, waiting_for=(5,))
    assert str(make_rank_error([done, waiting])).startswith(
        "member 5 returned without joining the world, while member 6 waited in lockstep.init()"
    )
    messages = ["rank 0: step 3 on rank 0", "rank 1: step 3 on rank 1"]
    errors = [raised(0, 1.0, each, "UsageError", plain=True).error for each in messages]
    same = [member(4, 0, status=1, error=errors[0]), member(5, 1, status=1, error=errors[1])]
    assert find_same_failures(same, same[0]) == same
    assert make_rank_error(same).rank == 4
    assert str(make_rank_error(same)) == "rank 0: step 3 on rank 0"
