"""The driver: calls, their output, and their errors."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.kernel.errors import LossError, RankError, UsageError
from lockstep.launcher import world as joined


@pytest.fixture(scope="module")
def driver():
    with ls.Driver(nprocs=3, timeout=60) as driver:
        yield driver


def fail() -> None:
    raise KeyError("lr")


def all_reduced() -> tuple[int, float]:
    tensor = torch.tensor(float(ls.rank() + 1))
    dist.all_reduce(tensor)
    return joined.world().world_size, tensor.item()


# --- calls ---------------------------------------------------------------------------------


def test_the_workers_are_one_world(driver):
    assert driver.world_size == 3
    assert driver.run(all_reduced) == [(3, 6.0)] * 3


def test_the_driver_is_outside_the_world(driver):
    assert not dist.is_initialized()
    assert os.getpid() not in driver.run(os.getpid)


def test_functions_are_sent_by_value_with_their_closure(driver):
    offset = 10
    assert driver.on(2).run(lambda more: offset + ls.rank() + more, 100) == 112
    assert driver.run(lambda *, scale: scale * ls.rank(), scale=2) == [0, 2, 4]


def test_calls_on_one_worker_run_in_order(driver):
    def add():
        os.environ["CALLS"] = str(int(os.environ.get("CALLS", "0")) + 1)
        return int(os.environ["CALLS"])

    futures = [driver.on(0).start(add) for _ in range(20)]
    assert [future.result() for future in futures] == list(range(1, 21))


def test_a_future_is_pending_until_it_is_done(driver, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    future = driver.on(1).start(gate.read_text)
    assert not future.done()
    with pytest.raises(TimeoutError, match=r"read_text on rank 1 has not returned within 0.05 s"):
        future.result(timeout=0.05)
    gate.write_text("open")
    assert future.result(timeout=30) == "open"
    assert future.done()


def test_tensors_are_returned_bit_for_bit(driver):
    tensor = torch.randn(3, 1000).to(torch.bfloat16)
    assert torch.equal(driver.on(1).run(torch.neg, tensor), -tensor)


def test_the_output_of_a_call_appears_before_it_returns(driver, capsys):
    driver.on(1).run(print, "one\ntwo")
    driver.on(2).run(os.system, "echo three >&2")
    printed = capsys.readouterr()
    assert printed.out == "[1] one\n[1] two\n"
    assert printed.err == "[2] three\n"
    driver.on(1).run(print, "\n".join(map(str, range(20_000))))  # more than a pipe holds
    assert capsys.readouterr().out.splitlines()[-1] == "[1] 19999"


# --- failing -------------------------------------------------------------------------------


def test_an_error_is_raised_with_its_traceback(driver):
    line = fail.__code__.co_firstlineno + 1
    with pytest.raises(RankError) as caught:
        driver.on(1).run(fail)
    assert str(caught.value) == f"rank 1 raised KeyError: 'lr' (test_driver.py:{line})"
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    (note,) = caught.value.__notes__
    assert 'raise KeyError("lr")' in note
    assert "lockstep/remote" not in note
    assert driver.on(1).run(ls.rank) == 1


def test_an_error_whose_class_cannot_be_pickled_is_reported(driver):
    def fail():
        class Odd(Exception):
            def __reduce__(self):
                raise TypeError("never")

        raise Odd("strange")

    with pytest.raises(RankError, match="rank 0 raised Odd: strange"):
        driver.on(0).run(fail)


def test_an_error_of_lockstep_keeps_its_class(driver):
    def fail():
        raise LossError("step 3: the loss is nan")

    with pytest.raises(LossError, match=r"^step 3: the loss is nan$"):
        driver.on(2).run(fail)


def test_exit_in_a_call_is_an_error_and_does_not_end_the_worker(driver):
    with pytest.raises(RankError, match="rank 0 raised SystemExit: 3"):
        driver.on(0).run(exit, 3)
    assert driver.on(0).run(ls.rank) == 0


def test_the_rank_that_failed_first_is_named(driver):
    def fail():
        if ls.rank() == 2:
            raise ValueError("only here")

    with pytest.raises(RankError, match=r"^rank 2 raised ValueError: only here"):
        driver.run(fail)


def test_a_value_that_cannot_be_pickled_is_an_error_of_the_call(driver):
    sentence = "rank 1: a value of type lock was returned, which cannot be sent to the driver: "
    with pytest.raises(UsageError, match=sentence):
        driver.on(1).run(threading.Lock)


def test_an_argument_that_cannot_be_pickled_is_named(driver):
    sentence = r"print and its arguments cannot be sent to rank 1: cannot pickle '_thread.lock'"
    with pytest.raises(UsageError, match=sentence):
        driver.on(1).run(print, 1, threading.Lock())


@pytest.mark.parametrize("rank", [-1, 3, "1"])
def test_an_unknown_rank_is_an_error(driver, rank):
    with pytest.raises(UsageError, match=f"there is no rank {rank}: the driver has ranks 0 to 2"):
        driver.on(rank)


def interrupt_when_waiting(driver) -> None:
    deadline = time.monotonic() + 30
    while not driver._pool.output._waiting:
        assert time.monotonic() < deadline
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_the_wait_but_not_the_call(driver, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    future = driver.on(1).start(gate.read_text)
    interrupter = threading.Thread(target=interrupt_when_waiting, args=(driver,))
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        future.result(timeout=30)
    interrupter.join()
    after = driver.on(1).start(ls.rank)
    gate.write_text("done")
    assert future.result(30) == "done"
    assert after.result(30) == 1
