"""The text of a failure, from how each rank ended."""

from __future__ import annotations

from lockstep.launcher.failure_attribution import Outcome
from pytest_lockstep.failure import describe_failure, drop_outer_frames
from pytest_lockstep.rank_order import Result


def failed(rank, message="assert 0 == 1", where="test_it.py:5", time=1.0, kind="AssertionError"):
    error = {
        "time": time,
        "type": kind,
        "message": message,
        "where": where,
        "traceback": "",
        "plain": False,
        "code": "",
        "report": {"of": rank},
        "class": "ab",
    }
    return Outcome(rank, error=error)


def passed(rank):
    return Outcome(rank, status=0, returned=True)


def test_ranks_that_pass_have_not_failed():
    assert describe_failure({0: passed(0), 1: passed(1)}, {}, {0: Result(), 1: Result()}) is None


def test_the_lowest_of_ranks_that_fail_in_one_place_is_shown():
    outcomes = {
        0: failed(0, time=3.0),
        1: failed(1, time=1.0),
        2: failed(2, "assert 2 == 1", time=2.0),
        3: failed(3, where="test_it.py:9", time=4.0),
    }
    failure = describe_failure(outcomes, {}, {})
    assert failure is not None
    assert (failure.rank, failure.report, failure.kind) == (0, {"of": 0}, "ab")
    assert str(failure).splitlines() == [
        "rank 0 raised AssertionError: assert 0 == 1 (test_it.py:5)",
        "rank 1 failed in the same way",
        "rank 2 also raised AssertionError: assert 2 == 1 (test_it.py:5)",
        "rank 3 also raised AssertionError: assert 0 == 1 (test_it.py:9)",
    ]


def test_the_others_are_where_they_were():
    lost = failed(2, "rank 2: all_reduce failed: rank 1 died (process 7)", time=0.5)
    outcomes = {0: Outcome(0), 1: failed(1), 2: lost, 3: passed(3), 4: Outcome(4, status=-11)}
    outcomes[4].when = 2.0
    places = {0: "in barrier, test_it.py:3"}
    results = {3: Result("skipped", "no GPU")}
    failure = describe_failure(outcomes, places, results)
    assert failure is not None
    assert str(failure).splitlines() == [
        "rank 1 raised AssertionError: assert 0 == 1 (test_it.py:5)",
        "rank 0 at that moment: in barrier, test_it.py:3",
        "rank 2 also raised AssertionError: rank 2: all_reduce failed: rank 1 died (process 7) "
        "(test_it.py:5)",
        "rank 3 skipped (no GPU)",
        "rank 4 was also killed by SIGSEGV",
    ]


def test_the_frames_of_pytest_are_not_shown():
    report = """rank 0 waits
rank 0 (process 1): has waited
    torch/distributed/c10d.py:9 in recv
  > /home/ann/test_it.py:3 in test_it
    _pytest/python.py:187 in pytest_pyfunc_call
    pluggy/_callers.py:5 in _multicall
  > /home/ann/pytest_lockstep/rank.py:4 in run
rank 1 (process 2): has waited
  > /home/ann/conftest.py:8 in model
    _pytest/fixtures.py:900 in call_fixture_func
    pluggy/_callers.py:5 in _multicall
(most recent call first; > marks your code)"""
    assert drop_outer_frames(report).splitlines() == [
        "rank 0 waits",
        "rank 0 (process 1): has waited",
        "    torch/distributed/c10d.py:9 in recv",
        "  > /home/ann/test_it.py:3 in test_it",
        "rank 1 (process 2): has waited",
        "  > /home/ann/conftest.py:8 in model",
        "(most recent call first; > marks your code)",
    ]
