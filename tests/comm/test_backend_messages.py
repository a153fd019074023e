"""Messages of the backend "lockstep" that nobody holds, waits for early or listens to."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import backend

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

LIMIT = 10.0  # seconds that a thread of a test may need


def within_limit(condition: Callable[[], bool]) -> bool:
    """Return whether the condition came true before the limit."""
    until = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > until:
            return False
    return True


# ---- that nobody holds ----


def matrix(seed: int) -> torch.Tensor:
    return torch.randn(600, 500, generator=torch.Generator().manual_seed(seed))


def reuse(shape: tuple[int, int]) -> None:
    """Write over freed memory of this size."""
    for _ in range(8):
        torch.full(shape, 99.0)


@pytest.mark.ranks(2)
def test_messages_need_no_work_to_be_held(rank):
    """Temporary tensors, and those with stand-ins."""
    arrived = torch.zeros(600, 500)
    first = torch.empty(500, 600)
    last = torch.empty(600, 500)
    if rank == 0:
        dist.isend(matrix(1).t(), 1)
        dist.isend(matrix(2).clone(), 1)
        reuse((600, 500))
        reuse((500, 600))
        dist.barrier()
        dist.barrier()
        dist.send(matrix(3).t().contiguous(), 1, tag=1)
        dist.barrier()
        return
    dist.irecv(arrived.t(), 0, tag=1)
    reuse((500, 600))
    dist.barrier()
    dist.recv(first, 0)
    dist.recv(last, 0)
    dist.barrier()
    dist.barrier()
    assert torch.equal(first, matrix(1).t())
    assert torch.equal(last, matrix(2))
    assert within_limit(lambda: torch.equal(arrived, matrix(3)))


# ---- that somebody listens to ----


def sent_to_who_listens() -> bool:
    """Send rank 1 a message once it listens."""
    dist.recv(torch.empty(1), 1)
    dist.send(torch.ones(3), 1)
    return True


def polled_in_its_callback() -> bool:
    """Ask for a work while its callback runs in another thread."""
    if dist.get_rank() == 0:
        return sent_to_who_listens()
    work = dist.irecv(torch.empty(3), 0)
    entered = threading.Event()
    go = threading.Event()
    called = work.get_future().then(lambda _: (entered.set(), go.wait(LIMIT))[1])
    dist.send(torch.ones(1), 0)
    entered.wait(LIMIT)
    over = work.is_completed()  # this holds the interpreter's lock
    go.set()
    return over and called.wait()


def waited_for_in_its_callback() -> bool:
    if dist.get_rank() == 0:
        return sent_to_who_listens()
    work = dist.irecv(torch.empty(3), 0)
    called = work.get_future().then(lambda _: work.wait())
    dist.send(torch.ones(1), 0)
    return called.wait()


def calls_in_callbacks() -> float:
    """Make collectives in callbacks of messages that come while others are under way."""
    rank = dist.get_rank()
    total = torch.zeros(1)
    for number in range(100):
        one = torch.ones(1)
        if rank == 0:
            dist.recv(torch.empty(1), 1)  # it listens
            dist.send(torch.ones(3), 1, tag=number)
            dist.barrier()
            dist.all_reduce(one)
        else:
            work = dist.irecv(torch.empty(3), 0, tag=number)
            after = threading.Event()
            called = work.get_future().then(
                lambda _, one=one, after=after: (after.wait(LIMIT), dist.all_reduce(one))
            )
            dist.send(torch.ones(1), 0)
            dist.barrier()
            after.set()
            called.wait()
        total += one
    return total.item()


def waits_for_another_callback() -> bool:
    """Wait in one callback for another message's."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1, tag=2)
        dist.recv(torch.empty(3), 1)
        dist.send(torch.ones(3), 1, tag=3)
        return True
    first, last = (dist.irecv(torch.empty(3), 0, tag=tag) for tag in (2, 3))
    seen = threading.Event()
    other = last.get_future().then(lambda _: seen.set())

    def callback(_: object) -> bool:
        dist.send(torch.ones(3), 0)
        other.wait()
        return seen.is_set()

    return first.get_future().then(callback).wait()


def complete_after_wait() -> bool:
    """Look into the future of a message right after its work was waited for."""
    if dist.get_rank() == 0:
        for _ in range(200):
            dist.send(torch.ones(3), 1)
        return True
    good = True
    for _ in range(200):
        work = dist.irecv(torch.empty(3), 0)
        future = work.get_future()
        work.wait()
        good = good and future.done() and future.value()[0].sum().item() == 3
    return good


def coalesced_future() -> list[float]:
    tensors = [torch.full((2,), float(dist.get_rank())), torch.full((3,), 5.0)]
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(2)]
    future = dist.all_gather_coalesced(lists, tensors, async_op=True)
    value = future.wait()
    return [tensor[0].item() for tensors in value for tensor in tensors]


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*coalesced:FutureWarning")
def test_callbacks_of_messages_may_do_anything():
    assert polled_in_its_callback()
    assert waited_for_in_its_callback()
    assert calls_in_callbacks() == 200.0
    assert waits_for_another_callback()
    assert complete_after_wait()
    assert coalesced_future() == [0.0, 5.0, 1.0, 5.0]


# ---- that are waited for late, or not for long ----


@pytest.mark.ranks(2, allow_leaks="groups")
def test_time_runs_where_somebody_waits(rank):
    group = dist.new_group(backend="lockstep", timeout=timedelta(seconds=0.5))
    got = torch.zeros(3)
    if rank == 1:
        work = dist.irecv(got, 0, group=group)
        begun = time.monotonic()
        while time.monotonic() < begun + 0.8:  # compute
            torch.ones(10).sum()
        with pytest.raises(RuntimeError) as caught:
            work.wait(timedelta(seconds=0.1))
        told = str(caught.value)
        assert "rank 1: recv from rank 0 (tag 0) on group" in told
        assert "timed out: it was not finished after 0.1 s; it continues in the background" in told
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(3), 1, group=group)
    else:
        work.wait()
    dist.all_reduce(got, group=group)
    assert got.tolist() == [1.0] * 3


@pytest.mark.ranks(2, allow_leaks="groups")
def test_a_future_ends_at_the_deadline_and_says_what_came_instead(rank):
    group = dist.new_group(backend="lockstep", timeout=timedelta(seconds=0.3))
    if rank == 1:
        dist.irecv(torch.empty(3), 0, tag=4, group=group)
        work = dist.irecv(torch.empty(3), 0, tag=7, group=group)  # which nobody sends
        with pytest.raises(RuntimeError) as caught:
            work.get_future().wait()
        told = str(caught.value)
        assert "rank 1 timed out after 0.3 s with a timeout of 0.3 s in recv from rank 0" in told
        assert "(tag 7), waiting for rank 0, which" in told
        assert "a message with tag 6 arrived from it but no receive was posted for it" in told
    else:
        dist.send(torch.ones(3), 1, tag=6, group=group)
    dist.barrier()


# ---- that are coalesced ----


@pytest.mark.ranks(2)
def test_a_coalescing_that_never_ends_holds_nothing():
    """Of 50 tensors it holds the last at most."""
    group = dist.group.WORLD
    group._start_coalescing(torch.device("cpu"))
    held = []
    for _ in range(50):
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        held.append(weakref.ref(tensor))
        del tensor
    gc.collect()
    # Another thread may just be letting go of one.
    assert within_limit(lambda: sum(each() is not None for each in held) <= 1)
    group._end_coalescing(torch.device("cpu")).wait()
