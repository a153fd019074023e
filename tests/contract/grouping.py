"""Groups of any ranks, and several at once from threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from contract.check import Ledger, outcome, same
from contract.movement import all_gather_single
from contract.plain import joined, reduced, written


def groups(run: Ledger, sizes: Sequence[int]) -> None:
    n = dist.get_world_size()
    for size in range(1, n + 1):
        for members in itertools.combinations(range(n), size):
            spoken = ",".join(map(str, members))
            run(f"of {spoken}", partial(one_group, list(members)))
    run("disjoint at once", halves)
    run("made and destroyed 8 times", made_and_destroyed)
    run("of all, beside the default", beside_the_default)
    run("roots by their rank in the group", roots_in_group)


def one_group(members: list[int]) -> None:
    """Do one of each in a group, while the others do nothing."""
    group = dist.new_group(members)
    if dist.get_rank() in members:
        inside(group, members)
        dist.destroy_process_group(group)


def inside(group: dist.ProcessGroup, members: list[int]) -> None:
    rank = dist.get_rank()
    n = len(members)
    tensor = written(rank, 50)
    dist.all_reduce(tensor, group=group)
    same(tensor, reduced("SUM", [written(r, 50) for r in members]), "all_reduce")
    tensor = written(rank, 50)
    dist.broadcast(tensor, members[-1], group=group)
    same(tensor, written(members[-1], 50), "broadcast")
    output = written(9, n * 5)
    all_gather_single(output, written(rank, 5), group=group)
    same(output, torch.cat([written(r, 5) for r in members]), "all_gather")
    dist.all_to_all_single(output, joined([written(rank, 5, part=p) for p in members]), group=group)
    same(output, torch.cat([written(r, 5, part=rank) for r in members]), "all_to_all")
    if n > 1:
        after = members[(members.index(rank) + 1) % n]
        before = members[members.index(rank) - 1]
        received = written(9, 5)
        work = dist.isend(written(rank, 5), after, group=group)
        dist.recv(received, before, group=group)
        work.wait()
        same(received, written(before, 5), "received")
    dist.barrier(group=group)


def halves() -> None:
    """Let even and odd ranks work at the same time, each in a group of its own."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    both = [[r for r in range(n) if r % 2 == odd] for odd in (0, 1)]
    made = [dist.new_group(members) if members else None for members in both]
    mine = both[rank % 2]
    group = made[rank % 2]
    assert group is not None
    for _ in range(10):
        inside(group, mine)
    dist.destroy_process_group(group)


def made_and_destroyed() -> None:
    n = dist.get_world_size()
    for _ in range(8):
        group = dist.new_group()
        tensor = written(dist.get_rank(), 7)
        dist.all_reduce(tensor, group=group)
        same(tensor, reduced("SUM", [written(r, 7) for r in range(n)]), "all_reduce")
        dist.barrier(group=group)
        dist.destroy_process_group(group)


def beside_the_default() -> None:
    """Use two groups of the same ranks in turn, with work pending in both."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    group = dist.new_group()
    first = written(rank, 3000)
    second = written(rank, 3000, part=1)
    works = [
        dist.all_reduce(first, async_op=True),
        dist.all_reduce(second, group=group, async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    same(first, reduced("SUM", [written(r, 3000) for r in range(n)]), "in the default group")
    same(second, reduced("SUM", [written(r, 3000, part=1) for r in range(n)]), "in the other")
    dist.barrier(group=group)
    dist.destroy_process_group(group)


def roots_in_group() -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    members = list(range(n))[n // 2 :]
    group = dist.new_group(members)
    if rank not in members:
        return
    tensor = written(rank, 9)
    dist.broadcast(tensor, group=group, group_src=len(members) - 1)
    same(tensor, written(members[-1], 9), "broadcast")
    tensor = written(rank, 9)
    dist.reduce(tensor, group=group, group_dst=len(members) - 1)
    if rank == members[-1]:
        same(tensor, reduced("SUM", [written(r, 9) for r in members]), "reduce")
    dist.barrier(group=group)
    dist.destroy_process_group(group)


def threads(run: Ledger, sizes: Sequence[int]) -> None:
    run("three groups at once", partial(from_threads, 3, 1000))
    run("three groups at once, large", partial(from_threads, 3, 100_000))
    run("one group waited for by another thread", handed_over)


def from_threads(count: int, size: int) -> None:
    """Let every thread use a group of its own; the threads run in any order."""
    made = [dist.new_group() for _ in range(count)]
    said: dict[int, str | None] = {}

    def work(number: int) -> None:
        said[number] = outcome(partial(in_thread, made[number], number, size))

    running = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    same([said[number] for number in range(count)], [None] * count, "threads")
    dist.barrier()
    for group in made:
        dist.destroy_process_group(group)


def in_thread(group: dist.ProcessGroup, number: int, size: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    for turn in range(5):
        part = number + turn
        tensor = written(rank, size + turn, part=part)
        dist.all_reduce(tensor, group=group)
        wanted = reduced("SUM", [written(r, size + turn, part=part) for r in range(n)])
        same(tensor, wanted, f"thread {number}, turn {turn}")


def handed_over() -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    tensor = written(rank, 5000)
    work = dist.all_reduce(tensor, async_op=True)
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join()
    same(tensor, reduced("SUM", [written(r, 5000) for r in range(n)]), "all_reduce")
