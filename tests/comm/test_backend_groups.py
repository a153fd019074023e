"""Groups of the backend "lockstep": of any ranks, at once, in threads, and gone when they go."""

from __future__ import annotations

import gc
import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import backend

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

on_lockstep = {"backend": "lockstep"}


GROUP_BYTES = 7 << 20  # of shared memory for a group of two


def open_things() -> tuple[int, int, int]:
    gc.collect()
    with open("/proc/self/maps") as maps:
        lines = sum("memfd:lockstep" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), lines, len(os.listdir("/proc/self/task"))


def resident() -> int:
    """Return this process's memory in bytes, shared pages included."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def many_groups(times: int) -> list[tuple[tuple[int, int, int], int]]:
    seen = []
    for number in range(times):
        group = dist.new_group(backend="lockstep")
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        work.wait()
        dist.destroy_process_group(group)
        del group, work
        if number in (10, times - 1):
            seen.append((open_things(), resident()))
    return seen


def check_nothing_is_left(found: list, groups: int) -> None:
    for (early, bytes_early), (end, bytes_end) in found:
        assert early == end
        assert bytes_end - bytes_early < groups * GROUP_BYTES / 10


def test_groups_that_come_and_go_leave_nothing(ranks):
    check_nothing_is_left(ranks(many_groups, 2, 100, timeout=100.0, **on_lockstep), 100)


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_a_thousand_groups_leave_nothing(ranks):
    check_nothing_is_left(ranks(many_groups, 2, 1000, timeout=250.0, **on_lockstep), 1000)


def several_groups() -> list[float]:
    """Use three groups at once from three threads, again and again."""
    groups = [dist.new_group(backend="lockstep") for _ in range(3)]
    sums = [0.0] * 3

    def use(number: int) -> None:
        for step in range(50):
            tensor = torch.full((1000,), float(number + step))
            dist.all_reduce(tensor, group=groups[number])
            sums[number] += tensor[0].item()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def test_groups_work_at_once_from_several_threads(ranks):
    expected = [2.0 * sum(number + step for step in range(50)) for number in range(3)]
    assert ranks(several_groups, 2, **on_lockstep) == [expected] * 2


def some_of_them() -> float | None:
    group = dist.new_group([3, 1], backend="lockstep")
    if dist.get_rank() not in (1, 3):
        return None
    tensor = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, 1, group=group)
    return tensor[0].item()


def test_a_group_of_some_ranks(ranks):
    assert ranks(some_of_them, 4, **on_lockstep) == [None, 4.0, None, 4.0]


def test_ranks_may_be_threads_of_one_process():
    store, results, n = dist.HashStore(), {}, 3

    def rank(number: int) -> None:
        native = backend.load().create(
            store, number, n, timedelta(seconds=20), "threads", list(range(n))
        )
        tensor = torch.full((300_000,), float(number + 1))
        options = dist.AllreduceOptions()
        native.allreduce([tensor], options).wait()
        got = torch.empty(100_000)
        send = native.send([tensor[:100_000].contiguous()], (number + 1) % n, 0)
        native.recv([got], (number - 1) % n, 0).wait()
        send.wait()
        results[number] = (tensor.unique().tolist(), got.unique().tolist())

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: ([6.0], [6.0]) for number in range(n)}
