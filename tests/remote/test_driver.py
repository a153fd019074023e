"""The driver: calls, remote objects, references, and errors."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.kernel.errors import LossError, RankError, UsageError


@pytest.fixture(scope="module")
def driver():
    with ls.Driver(nprocs=3, timeout=60) as driver:
        yield driver


class Counter:
    """Something that lives in a worker."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def add(self, more: int = 1) -> int:
        self.count += more
        return self.count

    def fail(self) -> None:
        raise KeyError("lr")


class Passer:
    """Passes on what it is asked to an object of another worker."""

    def __init__(self, other) -> None:
        self.other = other

    def add(self, more: int) -> int:
        return self.other.add(more)


def counters() -> int:
    """Return how many counters live in this process, the library's own kind not counted."""
    kinds = [type(thing) for thing in gc.get_objects()]
    return sum(kind.__name__ == "Counter" and kind.__module__ != "collections" for kind in kinds)


def all_reduced() -> tuple[int, float]:
    tensor = torch.tensor(float(ls.rank() + 1))
    dist.all_reduce(tensor)
    return ls.world().world_size, tensor.item()


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
    counter = driver.on(0).create(Counter)
    futures = [counter.add.start() for _ in range(20)]
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


# --- remote objects ------------------------------------------------------------------------


def test_a_remote_object(driver):
    counter = driver.on(1).create(Counter, 10)
    assert repr(counter) == "<Counter on rank 1>"
    assert counter.add(5) == 15
    assert counter.get("count") == 15
    copy = counter.get()
    assert copy.count == 15
    copy.add()
    assert counter.get("count") == 15
    assert driver.on(1).run(counters) == 1
    assert driver.on(0).run(counters) == 0


def test_a_remote_module_can_be_called(driver):
    layer = driver.on(2).create(torch.nn.Linear, 3, 2)
    assert layer(torch.ones(4, 3)).shape == (4, 2)
    assert layer.get("weight").requires_grad


def test_a_reference_at_its_owner_is_the_object_itself(driver):
    counter = driver.on(1).create(Counter, 3)
    assert (
        driver.on(1).run(lambda mine: type(mine).__name__ + str(mine.count), counter) == "Counter3"
    )


def test_a_worker_calls_the_object_of_another_worker_directly(driver):
    counter = driver.on(1).create(Counter)
    assert driver.on(0).run(lambda ref: (repr(ref), ref.add(7)), counter) == (
        "<Counter on rank 1>",
        7,
    )
    payload = torch.randn(1 << 18)
    holder = driver.on(2).create(list)
    driver.on(0).run(lambda ref, tensor: ref.append(tensor), holder, payload)
    assert torch.equal(driver.on(1).run(lambda ref: ref.get()[0], holder), payload)


def test_workers_may_call_each_other_at_the_same_time(driver):
    here, there = driver.on(0).create(Counter), driver.on(1).create(Counter)

    def many(ref):
        return [ref.add() for _ in range(50)][-1]

    one, other = driver.on(0).start(many, there), driver.on(1).start(many, here)
    assert (one.result(30), other.result(30)) == (50, 50)


def test_a_call_may_come_back_to_the_worker_that_waits(driver):
    counter = driver.on(0).create(Counter)
    passer = driver.on(1).create(Passer, counter)
    assert driver.on(0).run(lambda passer: passer.add(5), passer) == 5


# --- freeing -------------------------------------------------------------------------------


@pytest.fixture
def no_counters(driver):
    """Wait until the objects of earlier tests are freed: one worker may have to tell another."""
    deadline = time.monotonic() + 10.0
    while driver.on(0).run(counters) > 0:
        assert time.monotonic() < deadline, "an object of an earlier test is still there"


@pytest.mark.usefixtures("no_counters")
def test_a_dropped_reference_frees_its_object(driver):
    counter = driver.on(0).create(Counter)
    assert driver.on(0).run(counters) == 1
    del counter
    assert driver.on(0).run(counters) == 0


@pytest.mark.usefixtures("no_counters")
def test_a_reference_that_another_worker_holds_keeps_the_object(driver):
    counter = driver.on(0).create(Counter)
    shelf = driver.on(1).create(list)
    driver.on(1).run(lambda shelf, ref: shelf.append(ref), shelf, counter)
    del counter
    assert driver.on(0).run(counters) == 1
    assert driver.on(1).run(lambda shelf: shelf[0].add(), shelf) == 1
    shelf.clear()
    # Worker 1 told worker 0 on the link of its calls: another call there comes after it.
    probe = driver.on(0).create(Counter)
    driver.on(1).run(lambda ref: ref.add(), probe)
    assert driver.on(0).run(counters) == 1
    del probe
    assert driver.on(0).run(counters) == 0


def test_a_reference_may_come_back_from_a_worker(driver):
    counter = driver.on(0).create(Counter)
    shelf = driver.on(1).create(dict)
    driver.on(1).run(lambda shelf, ref: shelf.update(it=ref), shelf, counter)
    del counter
    again = driver.on(1).run(lambda shelf: shelf.pop("it"), shelf)
    assert again.add(2) == 2


@pytest.mark.usefixtures("no_counters")
def test_references_are_dropped_if_another_argument_cannot_be_pickled(driver):
    counter = driver.on(0).create(Counter)
    with pytest.raises(UsageError, match="cannot be pickled"):
        driver.on(1).run(print, counter, threading.Lock())
    del counter
    assert driver.on(0).run(counters) == 0


# --- failing -------------------------------------------------------------------------------


def test_an_error_is_raised_with_its_traceback(driver):
    counter = driver.on(1).create(Counter)
    line = Counter.fail.__code__.co_firstlineno + 1
    with pytest.raises(RankError) as caught:
        counter.fail()
    assert str(caught.value) == f"rank 1 raised KeyError: 'lr' (test_driver.py:{line})"
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    (note,) = caught.value.__notes__
    assert 'raise KeyError("lr")' in note
    assert "lockstep/remote" not in note
    assert counter.add() == 1


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
    with pytest.raises(RankError, match=r"rank 1 raised TypeError: cannot pickle '_thread.lock'"):
        driver.on(1).run(threading.Lock)


def test_an_argument_that_cannot_be_pickled_is_named(driver):
    class Guarded:
        def __init__(self):
            self.lock = threading.Lock()

    sentence = (
        r"print cannot be sent to rank 1: argument 2 \(of class .*Guarded\) cannot be pickled"
    )
    with pytest.raises(UsageError, match=sentence):
        driver.on(1).run(print, 1, Guarded())


@pytest.mark.parametrize("rank", [-1, 3, "1"])
def test_an_unknown_rank_is_an_error(driver, rank):
    with pytest.raises(UsageError, match=f"there is no rank {rank}: the driver has ranks 0 to 2"):
        driver.on(rank)


def interrupt_when_waiting(driver) -> None:
    deadline = time.monotonic() + 30
    while not driver._pool.output.has_waiting_callers:
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
