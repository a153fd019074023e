"""Races: random calls of random sizes, checked, for as long as one likes (LOCKSTEP_STRESS_SECONDS).

The short test below runs always, the long one with `-m stress`.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import backend
from lockstep.comm.collectives import all_gather_single
from lockstep.comm.shared_memory import empty_shared

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

SMALL = {
    "LOCKSTEP_SLOT_BYTES": "512",
    "LOCKSTEP_STAGING_BYTES": "1024",
    "LOCKSTEP_CELL_BYTES": "128",
    "LOCKSTEP_BOUNCE_BYTES": "256",
    "LOCKSTEP_CACHE_BYTES": "4096",
}


def tensor_for(draw: random.Random, numel: int) -> torch.Tensor:
    """Return a private tensor, or one in shared memory; the same kind on all ranks or not."""
    shared = draw.random() < 0.5 or (draw.random() < 0.2 and dist.get_rank() % 2 == 0)
    return empty_shared(numel) if shared else torch.empty(numel)


def one_call(draw: random.Random, waiting: list) -> None:
    rank = dist.get_rank()
    n = dist.get_world_size()
    numel = draw.choice((0, 1, 7, 100, 129, 1000, 5000))
    kind = draw.randrange(7)
    root = draw.randrange(n)
    later = draw.random() < 0.4
    mine = tensor_for(draw, numel).fill_(rank + 1)
    total = n * (n + 1) / 2
    if kind == 0:
        work = dist.all_reduce(mine, async_op=later)
        check = (mine, torch.full((numel,), total))
    elif kind == 1:
        work = dist.broadcast(mine, root, async_op=later)
        check = (mine, torch.full((numel,), root + 1.0))
    elif kind == 2:
        whole = tensor_for(draw, numel * n)
        work = all_gather_single(whole, mine, async_op=later)
        check = (whole, torch.arange(1.0, n + 1).repeat_interleave(numel))
    elif kind == 3:
        whole = tensor_for(draw, numel * n).fill_(rank + 1)
        work = dist.reduce_scatter_tensor(mine, whole, async_op=later)
        check = (mine, torch.full((numel,), total))
    elif kind == 4:
        whole = torch.empty(numel * n)
        given = torch.full((numel * n,), rank + 1.0)
        work = dist.all_to_all_single(whole, given, async_op=later)
        check = (whole, torch.arange(1.0, n + 1).repeat_interleave(numel))
    elif kind == 5:
        work = dist.reduce(mine, root, async_op=later)
        check = (mine, torch.full((numel,), total if rank == root else rank + 1.0))
    else:
        got = torch.empty(numel)
        sent = dist.isend(mine, (rank + 1) % n, tag=numel)
        work = dist.irecv(got, (rank - 1) % n, tag=numel)
        waiting.append((sent, (mine, mine)))
        later = True
        check = (got, torch.full((numel,), (rank - 1) % n + 1.0))
    if later:
        waiting.append((work, check))
    else:
        assert torch.equal(*check)


def random_calls(seconds: float, seed: int) -> int:
    draw = random.Random(seed)
    waiting = []
    calls = 0
    until = time.monotonic() + seconds
    going = torch.ones(1)
    while going.item():
        for _ in range(50):
            one_call(draw, waiting)
            calls += 1
            while waiting and draw.random() < 0.5:
                work, check = waiting.pop(draw.randrange(len(waiting)))
                work.wait()
                assert torch.equal(*check)
        going.fill_(time.monotonic() < until)
        dist.broadcast(going, 0)
    for work, check in waiting:
        work.wait()
        assert torch.equal(*check)
    return calls


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("unreadable", ["", "1"])
def test_random_calls_come_out_right(ranks, monkeypatch, unreadable):
    for name, value in {**SMALL, "LOCKSTEP_NO_READ": unreadable}.items():
        monkeypatch.setenv(name, value)
    calls = ranks(random_calls, 3, 1.0, 7, backend="lockstep")
    assert calls[0] >= 50
    assert len(set(calls)) == 1


@pytest.mark.stress
@pytest.mark.timeout(0)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_random_calls_for_long(ranks, monkeypatch, n):
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    seconds = float(os.environ.get("LOCKSTEP_STRESS_SECONDS", "20"))
    for seed in range(3):
        ranks(random_calls, n, seconds / 3, seed, backend="lockstep", timeout=seconds + 60)
