"""Where ranks are, as seen from their launcher."""

from __future__ import annotations

import signal

import pytest

import lockstep as ls
from lockstep.errors import RankError
from lockstep.launcher import rendezvous_check
from lockstep.launcher.hang_monitor import NOT_USER_CODE, describe_location, is_waiting

DUMP = """\
Current thread 0x00007f (most recent call first):
  File "{torch}/torch/distributed/distributed_c10d.py", line 3168 in all_reduce
  File "{torch}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 31 in step
  File "/home/me/train.py", line 60 in <module>
""".format(torch=NOT_USER_CODE[1])


def test_the_location_is_the_call_and_the_line_of_user_code():
    assert describe_location(DUMP) == "in all_reduce, train.py:31"
    assert is_waiting(DUMP)


def test_the_rendezvous_check_counts_as_waiting():
    frames = f'  File "{rendezvous_check.__file__}", line 7 in check_ranks\n'
    assert is_waiting(f"Current thread (most recent call first):\n{frames}")


def test_the_last_dump_counts():
    later = 'Current thread (most recent call first):\n  File "/home/me/train.py", line 7 in f\n'
    assert describe_location(DUMP + later) == "at train.py:7"
    assert not is_waiting(DUMP + later)
    assert describe_location("") == ""


def wait_forever():
    signal.pause()


@pytest.fixture(autouse=True)
def started():
    ls.launch(int, nprocs=1)  # a deadline includes the start of the first launch


def test_the_error_after_a_timeout_says_where_a_rank_waits():
    line = wait_forever.__code__.co_firstlineno + 1
    with pytest.raises(RankError, match=rf"\(rank 0 was at test_hang_monitor.py:{line}\)$"):
        ls.launch(wait_forever, nprocs=1, timeout=0.5)


def test_the_error_after_a_timeout_says_that_a_rank_is_stopped():
    def stop():
        import os

        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(RankError, match=r"\(rank 0 was stopped\)$"):
        ls.launch(stop, nprocs=1, timeout=0.5)
