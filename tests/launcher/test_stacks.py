"""Stacks: where a rank is, by what Python's fault handler wrote."""

from __future__ import annotations

from lockstep.launcher import rendezvous_check, stacks
from lockstep.launcher.stacks import describe_location, is_waiting
from lockstep.user_code import shorten_path
from stack_dumps import DUMP


def test_the_location_is_the_call_and_the_line_of_user_code():
    assert describe_location(DUMP) == "in all_reduce, train.py:31"
    assert is_waiting(DUMP)


def test_the_rendezvous_check_counts_as_waiting():
    frames = f'  File "{rendezvous_check.__file__}", line 7 in check_ranks\n'
    assert is_waiting(f"Current thread (most recent call first):\n{frames}")


def test_a_stack_without_user_code_has_a_location_too():
    frames = f'  File "{rendezvous_check.__file__}", line 7 in check_ranks\n'
    dump = f"Current thread (most recent call first):\n{frames}"
    file = shorten_path(rendezvous_check.__file__)
    assert describe_location(dump) == f"in check_ranks, {file}:7"


def test_the_last_dump_counts():
    later = 'Current thread (most recent call first):\n  File "/home/me/train.py", line 7 in f\n'
    assert describe_location(DUMP + later) == "at train.py:7"
    assert not is_waiting(DUMP + later)
    assert describe_location("") == ""


def test_a_rank_that_gets_no_processor_has_more_time_to_write_its_stack(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "TIMEOUT", 0.0)
    with open(tmp_path / "stack", "w+b") as file:
        asked = []

        def is_starved(rank):
            asked.append(rank)
            if len(asked) == 3:  # it runs at last
                file.write(DUMP.encode())
                file.flush()
            return True

        assert stacks.read_stacks({5: file.fileno()}, is_starved) == {5: DUMP}
        assert asked == [5, 5, 5]


def test_a_rank_that_runs_and_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "TIMEOUT", 0.0)
    with open(tmp_path / "stack", "w+b") as file:
        assert stacks.read_stacks({5: file.fileno()}, lambda rank: False) == {5: ""}
