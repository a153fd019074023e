"""The contract's operations on more ranks than there are cores, and on threads of one process."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

import lockstep as ls
from contract.handful import handful
from lockstep.comm import backend

BACKEND = "lockstep" if backend.available() else "gloo"
OPERATIONS = 18


def on_the_first(widths: tuple[int, ...]) -> list[int]:
    """Run the operations in groups of the first ranks; return how many in each of my groups."""
    ran = []
    for width in widths:
        group = dist.new_group(list(range(width)))
        if ls.rank() < width:
            ran.append(len(handful(group, ls.rank(), width)))
    return ran


def test_groups_of_5_and_8_ranks(ranks):
    found = ranks(on_the_first, 8, (5, 8), backend=BACKEND, timeout=100.0)
    assert found == [[OPERATIONS] * groups for groups in [2] * 5 + [1] * 3]


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("n", [16, 64])
def test_a_group_of_many_ranks(ranks, n):
    found = ranks(on_the_first, n, (n,), backend=BACKEND, timeout=500.0)
    assert found == [[OPERATIONS]] * n


@pytest.mark.skipif(not backend.available(), reason="the extension is not built here")
@pytest.mark.parametrize("n", [1, 2, 5])
def test_ranks_that_are_threads_of_one_process(n):
    store = dist.HashStore()
    ran = {}

    def rank(number: int) -> None:
        native = backend.load_native().create(
            store, number, n, timedelta(seconds=60), "threads", list(range(n))
        )
        ran[number] = len(handful(native, number, n))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ran == dict.fromkeys(range(n), OPERATIONS)
