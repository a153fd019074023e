"""Groups of the backend "lockstep": of any ranks, at once, in threads, and gone when they go."""

from __future__ import annotations

import gc
import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import pytest_lockstep
from lockstep.comm import backend

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

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


def check_nothing_is_left(times: int) -> None:
    """Make and destroy groups, and compare what is open after the first ones and in the end."""
    seen = []
    for number in range(times):
        group = dist.new_group(backend="lockstep")
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        work.wait()
        dist.destroy_process_group(group)
        del group, work
        if number in (10, times - 1):
            seen.append((open_things(), resident()))
    (early, bytes_early), (end, bytes_end) = seen
    assert early == end
    assert bytes_end - bytes_early < times * GROUP_BYTES / 10


@pytest.mark.ranks(2, timeout=100)
def test_groups_that_come_and_go_leave_nothing():
    check_nothing_is_left(100)


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.ranks(2, timeout=250)
def test_a_thousand_groups_leave_nothing():
    check_nothing_is_left(1000)


@pytest.mark.ranks(2, allow_leaks="groups")
def test_groups_work_at_once_from_several_threads():
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
    assert sums == [2.0 * sum(number + step for step in range(50)) for number in range(3)]


@pytest.mark.ranks(4, allow_leaks="groups")
def test_a_group_of_some_ranks(rank):
    group = dist.new_group([3, 1], backend="lockstep")
    if rank in (1, 3):
        tensor = torch.full((5,), float(rank))
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, 1, group=group)
        assert tensor.tolist() == [4.0] * 5


@pytest.mark.ranks(3, allow_leaks="groups")
def test_ranks_that_name_other_members_get_an_error_with_both_lists(rank):
    lists = [[0, 1], [1, 2], [0, 2]]  # none of which can be complete
    with pytest.raises(RuntimeError, match=r"ranks \d, \d, another rank of ranks \d, \d") as error:
        dist.new_group(lists[rank], timeout=timedelta(seconds=60))
    shown = [
        members for members in lists if f"ranks {members[0]}, {members[1]}" in str(error.value)
    ]
    assert len(shown) == 2
    assert lists[rank] in shown
    # The next group has another name, and so has a group of the next world in this store.
    group = dist.new_group([0, 1] if rank < 2 else [2])
    assert (group.size(), dist.get_process_group_ranks(group)[-1]) == (
        (2, 1) if rank < 2 else (1, 2)
    )


def make_worlds(path: str) -> list[float]:
    rank = int(os.environ["RANK"])
    sums = []
    store = dist.FileStore(path, 3)
    for members in ([0, 1], [1, 2], [0, 2]):
        dist.init_process_group("lockstep", store=store, rank=rank, world_size=3)
        group = dist.new_group(members)
        tensor = torch.tensor([1.0 + rank])
        if rank in members:
            dist.all_reduce(tensor, group=group)
            sums.append(tensor.item())
        dist.destroy_process_group()
    return sums


def test_a_group_may_have_other_members_in_a_later_world_of_the_same_store(tmp_path):
    sums = pytest_lockstep.run(
        make_worlds, str(tmp_path / "store"), ranks=3, timeout=60, init=False
    )
    assert sums == [[3.0, 4.0], [3.0, 5.0], [5.0, 4.0]]


def test_ranks_may_be_threads_of_one_process():
    store = dist.HashStore()
    results = {}
    n = 3

    def rank(number: int) -> None:
        native = backend.load_native().create(
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
