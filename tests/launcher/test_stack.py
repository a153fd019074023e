"""Where a rank is, read from outside."""

from __future__ import annotations

import signal

import pytest

import lockstep as ls
from lockstep.errors import RankError
from lockstep.launcher import stack

DUMP = """\
Current thread 0x00007f (most recent call first):
  File "{torch}/torch/distributed/distributed_c10d.py", line 3168 in all_reduce
  File "{torch}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 31 in step
  File "/home/me/train.py", line 60 in <module>
""".format(torch=stack.PACKAGES[1])


def test_the_call_and_the_users_line_are_found():
    assert stack.where(DUMP) == "in all_reduce, train.py:31"
    assert stack.waiting(DUMP)


def test_the_last_dump_counts():
    later = 'Current thread (most recent call first):\n  File "/home/me/train.py", line 7 in f\n'
    assert stack.where(DUMP + later) == "at train.py:7"
    assert not stack.waiting(DUMP + later)
    assert stack.where("") == ""


def wait_for_ever():
    signal.pause()


@pytest.fixture(autouse=True)
def started():
    ls.launch(int, nprocs=1)  # a deadline includes the start of the first launch


def test_a_rank_that_is_late_is_found_where_it_waits():
    line = wait_for_ever.__code__.co_firstlineno + 1
    with pytest.raises(RankError, match=rf"\(rank 0 was at test_stack.py:{line}\)$"):
        ls.launch(wait_for_ever, nprocs=1, timeout=0.5)


def test_a_stopped_rank_does_not_answer_and_is_said_to_be_stopped():
    def stop():
        import os

        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(RankError, match=r"\(rank 0 was stopped\)$"):
        ls.launch(stop, nprocs=1, timeout=0.5)
