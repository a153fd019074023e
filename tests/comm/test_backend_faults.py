"""The backend "lockstep" when ranks die, stay away or disagree: an error that says so, soon."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from lockstep.comm import backend
from lockstep.comm.hosts import connections
from lockstep.kernel.errors import RankError

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

on_lockstep = {"backend": "lockstep"}


def error_of(call) -> str:
    """Return what a call raises, "" if nothing, with the seconds it took in front."""
    begun = time.monotonic()
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{time.monotonic() - begun:.3f} {error}"
    return ""


def sparse() -> torch.Tensor:
    """Return a tensor that shared memory does not carry: calls with it are Gloo's."""
    return torch.sparse_coo_tensor(
        torch.tensor([[1, 3]]), torch.ones(2, 3), (4, 3), check_invariants=True
    )


# ---- death and silence ----


def die_while_others_wait(operation: str) -> str:
    rank = dist.get_rank()
    n = dist.get_world_size()
    tensor = torch.ones(4)
    group = dist.new_group([2, 0])
    pids = [0] * n
    dist.all_gather_object(pids, os.getpid())
    if rank == 2 and operation == "exit":
        os._exit(3)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if operation == "later":  # the others compute meanwhile
        with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(pids[2])) as gone:
            assert select.select([gone], [], [], 30)[0]
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "large": lambda: dist.all_reduce(torch.ones(1 << 20)),
        "async": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        # These two talk to each other, not to the one that dies.
        "recv": lambda: dist.recv(tensor, 1 - rank),
        "any": lambda: dist.recv(tensor),
        "send": lambda: dist.send(torch.ones(1 << 20), 1 - rank),
        "future": lambda: dist.irecv(tensor, 1 - rank).get_future().wait(),
        "barrier": dist.barrier,
        "all_gather": lambda: dist.all_gather([torch.ones(9_000)] * n, torch.ones(9_000)),
        "all_to_all": lambda: dist.all_to_all_single(torch.ones(3 << 18), torch.ones(3 << 18)),
        "group": lambda: dist.all_reduce(tensor, group=group if rank == 0 else None),
        "exit": lambda: dist.broadcast(tensor, 2),
        "later": lambda: dist.all_reduce(tensor),
        "sparse": lambda: dist.all_reduce(sparse()),
    }
    assert n == 3
    told = error_of(calls[operation])
    with open(f"{os.environ['NOTES']}/{rank}", "w") as notes:
        notes.write(told)
    return told


@pytest.mark.parametrize(
    "operation",
    [
        "all_reduce", "large", "async", "recv", "any", "send", "future", "barrier", "all_gather",
        "all_to_all", "group", "exit", "later", "sparse",
    ],
)  # fmt: skip
def test_a_dead_rank_is_named_by_all_within_a_second(ranks, operation, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path))
    how = "exited with status 3" if operation == "exit" else "was killed by SIGKILL"
    with pytest.raises(RankError, match=f"rank 2 {how}"):
        ranks(die_while_others_wait, 3, operation, **on_lockstep)
    for rank in (0, 1):
        seconds, _, told = (tmp_path / str(rank)).read_text().partition(" ")
        assert float(seconds) < 1
        assert "rank 2 died" in told
        assert f"rank {rank}: " in told


def late() -> str:
    dist.barrier()
    if dist.get_rank() == 1:
        released = dist.distributed_c10d._get_default_store()
        busy_in_this_function(released)
        return error_of(dist.barrier)
    told = error_of(lambda: dist.all_reduce(torch.ones(3)))
    dist.distributed_c10d._get_default_store().set("told", "yes")
    return told


def busy_in_this_function(store) -> None:
    store.wait(["told"], timedelta(seconds=30))


def test_a_rank_that_does_not_come_is_named_with_its_place(ranks):
    waited, came = ranks(late, 2, timeout=1.0, deadline=60.0, **on_lockstep)
    seconds, _, told = waited.partition(" ")
    assert 1 <= float(seconds) < 4
    assert "all_reduce #2 on group default failed: rank 0 timed out after 1." in told
    assert "waiting for rank 1, last seen at #1 barrier, now in test_backend_faults.py:" in told
    assert "(busy_in_this_function)" in told
    assert "rank 0 timed out" in came  # who comes later learns why it is over


def impatient() -> list[str]:
    """Change the timeout of a live group in every way that a program for Gloo may take."""
    native = dist.group.WORLD._get_backend(torch.device("cpu"))
    short = timedelta(seconds=0.2)
    ways = {
        "group": lambda: dist.group.WORLD.set_timeout(short),
        "backend": lambda: native._set_default_timeout(short),
        "options": lambda: setattr(native.options, "_timeout", short),
    }
    told = []
    for way in ways.values():
        native.set_timeout(timedelta(seconds=30))
        way()
        told.append(str(native.options._timeout.total_seconds()))
    if dist.get_rank() == 0:
        told.append(error_of(lambda: dist.all_reduce(torch.ones(3))))
    else:
        dist.distributed_c10d._get_default_store().wait(["told"], timedelta(seconds=30))
    dist.distributed_c10d._get_default_store().set("told", "yes")
    return told


def test_the_timeout_of_a_live_group_can_be_set(ranks):
    *told, error = ranks(impatient, 2, **on_lockstep)[0]
    assert told == ["0.2"] * 3
    assert "rank 0 timed out after 0." in error
    assert "with a timeout of 0.2 s in all_reduce #1" in error


def interrupt_while_waiting(operation: str) -> str:
    """Have rank 1 interrupt rank 0 thrice, which must be in its call when it hears the third."""
    rank = dist.get_rank()
    tensor = torch.ones(4)
    store = c10d._get_default_store()
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "async": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "recv": lambda: dist.recv(tensor, 1),
    }
    if rank == 1:
        pid = int(store.get("pid"))
        while not store.check(["ended"]):
            os.kill(pid, signal.SIGINT)
            with suppress(RuntimeError):  # at the deadline
                store.wait(["ended"], timedelta(milliseconds=100))
        store.set("heard", "1")
        return error_of(lambda: dist.all_reduce(tensor))
    heard = []

    def handler(number: int, frame: object) -> None:
        heard.append(number)
        if len(heard) == 3:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    store.set("pid", str(os.getpid()))
    try:
        calls[operation]()
    except KeyboardInterrupt:
        return "0.0 KeyboardInterrupt"
    finally:
        store.set("ended", "1")
        store.wait(["heard"], timedelta(seconds=30))  # nothing is on its way any more
        signal.signal(signal.SIGINT, before)
    return ""


@pytest.mark.parametrize("operation", ["all_reduce", "async", "recv"])
def test_ctrl_c_ends_a_wait(ranks, operation):
    alone, other = ranks(interrupt_while_waiting, 2, operation, **on_lockstep)
    assert alone == "0.0 KeyboardInterrupt"
    assert "rank 0 was interrupted" in other


def test_the_deadline_holds_for_joining():
    store = dist.HashStore()
    told = error_of(
        lambda: dist.init_process_group(
            "lockstep", store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.3)
        )
    )
    assert "rank 1 did not join within 0.3 s (timed out)" in told


def test_a_rank_that_joins_twice_is_named_to_all_at_once():
    store = dist.HashStore()
    told = []

    def join(rank: int) -> None:
        limit = timedelta(seconds=30)
        told.append(
            error_of(lambda: backend.load_native().create(store, rank, 3, limit, "trio", [0, 1, 2]))
        )

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in told:
        seconds, _, told_by = each.partition(" ")
        assert float(seconds) < 10
        assert "rank 1 joined group trio twice, as process " in told_by
        assert "give each process its own RANK" in told_by
    assert len(told) == 3


# ---- failures in Gloo, after all ranks have arrived at the call ----


def fail_in_gloo(moment: str, notes: str) -> None:
    """Have rank 2 die, or stay away, before or after it has connected to the others."""
    rank = dist.get_rank()
    store = c10d._get_default_store()
    connect = connections.connect_on_host

    def connect_or_fail(*arguments):
        if moment == "connected":
            made = connect(*arguments)
        if moment != "late":
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["told"], timedelta(seconds=60))
        return made if moment == "connected" else connect(*arguments)

    if rank == 2:
        connections.connect_on_host = connect_or_fail
    told = error_of(lambda: dist.all_reduce(sparse()))
    again = error_of(lambda: dist.all_reduce(torch.ones(3)))
    Path(notes, str(rank)).write_text(f"{told}\n{again}")
    store.set("told", "yes")


@pytest.mark.parametrize("moment", ["connecting", "connected"])
def test_a_rank_that_dies_in_a_call_of_gloo_is_named_by_all(ranks, moment, tmp_path):
    with pytest.raises(RankError, match="rank 2 was killed by SIGKILL"):
        ranks(fail_in_gloo, 3, moment, str(tmp_path), timeout=3.0, deadline=60.0, **on_lockstep)
    for rank in (0, 1):
        for told in (tmp_path / str(rank)).read_text().splitlines():
            assert f"rank {rank}: all_reduce #" in told
            assert "on group default failed: rank 2 died (process " in told


def test_a_failure_of_gloo_is_stated_by_all_ranks(ranks, tmp_path):
    ranks(fail_in_gloo, 3, "late", str(tmp_path), timeout=3.0, deadline=60.0, **on_lockstep)
    causes = set()
    for rank in range(3):
        for told in (tmp_path / str(rank)).read_text().splitlines():
            head, _, cause = told.partition(" on group default failed: ")
            assert f"rank {rank}: all_reduce #" in head
            causes.add(cause)
    [cause] = causes
    assert " failed in Gloo: " in cause


def use_gloo_in_many_groups() -> list[list[int]]:
    """Add sparse tensors in groups that exist at once, and in a new one after the other."""
    rank = dist.get_rank()
    found = []
    groups = [dist.new_group(members) for members in ([2, 0], [0, 1, 2], [1])]
    for members, group in zip(([2, 0], [0, 1, 2], [1]), groups, strict=True):
        if rank in members:
            tensor = sparse()
            dist.all_reduce(tensor, group=group)
            found.append([len(members), int(tensor.to_dense()[3, 0])])
    for _ in range(3):
        group = dist.new_group()
        tensor = sparse()
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)
        found.append([3, int(tensor.to_dense()[1, 2])])
    return found


def test_each_group_connects_over_gloo_by_itself(ranks):
    for found in ranks(use_gloo_in_many_groups, 3, **on_lockstep):
        assert len(found) >= 5
        assert all(size == total for size, total in found)


# ---- disagreement ----


def disagree(kind: str) -> str:
    rank = dist.get_rank()
    tensor = torch.ones(4)
    calls = {
        "operation": (lambda: dist.all_reduce(tensor), lambda: dist.broadcast(tensor, 0)),
        "size": (lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(tensor[:3])),
        "dtype": (lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(tensor.double())),
        "layout": (lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(sparse()[:, 0])),
        "reduction": (
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX),
        ),
        "root": (lambda: dist.broadcast(tensor, 0), lambda: dist.broadcast(tensor, 1)),
        "parts": (
            lambda: dist.all_to_all_single(torch.empty(4), tensor),
            lambda: dist.all_to_all_single(torch.empty(3), tensor, [1, 2], [2, 2]),
        ),
        "buffer": (lambda: dist.broadcast(tensor, 0), lambda: dist.broadcast(torch.ones(5), 0)),
    }
    told = error_of(calls[kind][rank])
    check = torch.ones(1)
    dist.all_reduce(check)  # the group goes on
    assert check == 2
    return told


@pytest.mark.parametrize(
    "kind", ["operation", "size", "dtype", "layout", "reduction", "root", "parts", "buffer"]
)
def test_ranks_that_disagree_learn_both_sides_at_once(ranks, kind):
    for rank, told in enumerate(ranks(disagree, 2, kind, **on_lockstep)):
        seconds, _, told = told.partition(" ")
        assert float(seconds) < 1
        assert f"rank {rank}: the ranks of group default disagree in call #1" in told
        assert "rank 0 called " in told
        assert "rank 1 called " in told
        assert told.count("in test_backend_faults.py:") == 2


ALIKE = {  # calls that differ only in the sizes of blocks, and what does not fit
    "splits": "rank 1 sends 1 element to rank 0, which expects 2; ranks 0, 1, 2 called all_to_all(",
    "lists": "rank 1 sends 1 element to rank 0, which expects 2; ranks 0, 1, 2 called all_to_all(",
    "gathered": "rank 1 sends 3 elements to rank 0, which expects 2; ranks 0, 2 called gather(",
    "scattered": "rank 0 sends 2 elements to rank 1, which expects 3; ranks 0, 2 called scatter(",
    "reduced": "rank 1 sends 2 elements to rank 0, which expects 1; rank 1 sends 2 elements to ",
}


def disagree_on_sizes(kind: str) -> str:
    rank = dist.get_rank()
    size = dist.get_world_size()
    wanted = [2 if rank == 0 and source == 1 else 1 for source in range(size)]
    row = torch.empty(2)
    ones = list(torch.ones(size, 1))
    uneven = torch.empty(3) if rank == 1 else row
    rows = [row] * size if rank == 0 else None
    calls = {
        "splits": lambda: dist.all_to_all_single(
            torch.empty(sum(wanted)), torch.ones(size), wanted, [1] * size
        ),
        "lists": lambda: dist.all_to_all([torch.empty(number) for number in wanted], ones),
        "gathered": lambda: dist.gather(uneven, rows, 0),
        "scattered": lambda: dist.scatter(uneven, rows, 0),
        "reduced": lambda: dist.reduce_scatter(
            torch.empty(1),
            [torch.ones(2) if rank == 1 != to else torch.ones(1) for to in range(size)],
        ),
    }
    return error_of(calls[kind])


@pytest.mark.parametrize("kind", ALIKE)
def test_ranks_whose_blocks_do_not_fit_learn_which(ranks, kind):
    for told in ranks(disagree_on_sizes, 3, kind, **on_lockstep):
        assert ALIKE[kind] in told


def wrong_size() -> str:
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
        return ""
    return error_of(lambda: dist.recv(torch.empty(4), 0))


def test_a_message_of_another_size_is_refused(ranks):
    _, told = ranks(wrong_size, 2, **on_lockstep)
    assert "rank 0 sent 3 elements of float32, but the tensor to receive has 4" in told


# ---- ranks that do not exist ----


@pytest.mark.parametrize("rank", [-1, -7, 2, 1 << 20])
def test_a_message_to_or_from_no_rank_is_refused(rank):
    native = backend.load_native().create(
        dist.HashStore(), 0, 1, timedelta(seconds=20), "alone", [0]
    )
    for call in (native.send, native.recv):
        for kind in (ValueError, RuntimeError):  # what this backend is about, and Gloo's
            with pytest.raises(kind, match=rf": there is no rank {rank} in a group of 1$"):
                call([torch.ones(2)], rank, 0)


@pytest.mark.parametrize(("rank", "ranks"), [(-1, [0]), (1, [0]), (0, [0, 1])])
def test_a_group_in_which_this_rank_cannot_be_is_refused(rank, ranks):
    with pytest.raises(ValueError, match=r"^a group of 1 can't have a rank"):
        backend.load_native().create(dist.HashStore(), rank, 1, timedelta(seconds=20), "odd", ranks)
