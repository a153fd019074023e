"""Stacks: where a rank is, by what Python's fault handler wrote."""

from __future__ import annotations

from lockstep.launcher import rendezvous_check, stacks
from lockstep.launcher.stacks import NOT_USER_CODE, describe_location, is_waiting

DUMP = """\
Current thread 0x00007f (most recent call first):
  File "{torch}/torch/distributed/distributed_c10d.py", line 3168 in all_reduce
  File "{torch}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 31 in step
  File "/home/me/train.py", line 60 in <module>
  File "{launcher}/rank_process.py", line 9 in run_code
""".format(torch=f"{NOT_USER_CODE[0]}/site-packages", launcher=stacks.LAUNCHER)


def test_the_location_is_the_call_and_the_line_of_user_code():
    assert describe_location(DUMP) == "in all_reduce, train.py:31"
    assert is_waiting(DUMP)


def test_the_rendezvous_check_counts_as_waiting():
    frames = f'  File "{rendezvous_check.__file__}", line 7 in check_ranks\n'
    assert is_waiting(f"Current thread (most recent call first):\n{frames}")


def test_a_stack_without_user_code_has_a_location_too():
    frames = f'  File "{rendezvous_check.__file__}", line 7 in check_ranks\n'
    dump = f"Current thread (most recent call first):\n{frames}"
    assert describe_location(dump) == f"in check_ranks, {rendezvous_check.__file__}:7"


def test_the_last_dump_counts():
    later = 'Current thread (most recent call first):\n  File "/home/me/train.py", line 7 in f\n'
    assert describe_location(DUMP + later) == "at train.py:7"
    assert not is_waiting(DUMP + later)
    assert describe_location("") == ""
