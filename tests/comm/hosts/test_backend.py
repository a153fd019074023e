"""A group across hosts: groups inside them, and what happens when one fails.

That its results are right for every placement is in test_contract.py.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
import pytest_lockstep
from lockstep.comm import backend
from lockstep.comm.activity import read_own_activity
from lockstep.comm.hosts.identity import IDENTITY
from lockstep.kernel.errors import RankError, RendezvousError
from placed import join

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")


def run(function: Callable[..., object], placement: str, *arguments: object) -> list:
    return pytest_lockstep.run(
        function, placement, *arguments, ranks=len(placement), timeout=60, init=False
    )


# ---- groups ----


def kinds_of_groups(placement: str) -> list[str]:
    join(placement)
    found = []
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 2, 3]):
        group = dist.new_group(ranks)
        if dist.get_rank() not in ranks:
            found.append("")
            continue
        found.append(type(group._get_backend(torch.device("cpu"))).__name__)
        tensor = torch.ones(5)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [float(len(ranks))] * 5
        assert (backend.of_group(group) is None) == (backend.host_group_of(group) is not None)
    dist.barrier()
    return found


def test_a_group_inside_a_host_is_the_native_one():
    native = "LockstepBackend"
    across = "HostProcessGroup"
    assert run(kinds_of_groups, "aabb") == [
        [native, "", across, ""],
        [native, "", "", across],
        ["", native, across, across],
        ["", native, "", across],
    ]


def class_on_one_host(placement: str) -> str:
    assert join(placement) is None
    return type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__


def test_a_world_on_one_host_has_the_native_group():
    assert run(class_on_one_host, "aa") == ["LockstepBackend"] * 2


def train_with_a_limit(placement: str, limit: int) -> tuple[str, str]:
    """Train where a group in shared memory holds at most so many ranks."""
    backend.MAX_LOCAL_RANKS = limit
    join(placement)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    trainer = ls.Trainer(
        model, torch.nn.functional.mse_loss, torch.optim.SGD, microbatches=8, seed=0, loggers=[]
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        trainer.step((torch.randn(16, 6, generator=generator), torch.zeros(16, 3)))
    return type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__, trainer.digest()


def test_more_ranks_than_a_group_in_shared_memory_holds_are_several_groups():
    [(native, expected)] = set(run(train_with_a_limit, "aaaa", 64))
    [(across, digest)] = set(run(train_with_a_limit, "aaaa", 3))
    assert (native, across) == ("LockstepBackend", "HostProcessGroup")
    assert digest == expected


def request_backend(placement: str) -> str:
    """Request the backend in a world of several hosts, of which the last one does not have it."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    os.environ["LOCAL_RANK"] = "0"
    if placement[rank] == "-":
        backend.reason_unavailable = lambda: "it is not built"
    try:
        ls.init(backend="lockstep", timeout=30)
    except RendezvousError as error:
        return str(error)
    return ""


def test_a_requested_backend_that_a_host_lacks_is_refused_on_every_host():
    for rank, told in enumerate(run(request_backend, "a-")):
        assert told.startswith(f"rank {rank}: the backend 'lockstep' is not available on host ")
        assert told.endswith(": it is not built; use 'gloo', or make it available on every host")


def choose_backend(placement: str) -> tuple[str, str]:
    """Join a world of several hosts, of which the last one does not have the native backend."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    os.environ["LOCAL_RANK"] = "0"
    if placement[rank] == "-":
        backend.reason_unavailable = lambda: "it is not built"
    with redirect_stderr(io.StringIO()) as told:
        name = ls.init(timeout=30).backend
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == len(placement)
    return name, told.getvalue()


def test_hosts_agree_on_a_backend_that_all_of_them_have():
    (name, told), (other, nothing) = run(choose_backend, "a-")
    assert (name, other, nothing) == ("gloo", "gloo", "")
    assert "using the backend gloo, which is slower than the backend 'lockstep'" in told
    assert ": it is not built\n" in told


def train_with_torch(placement: str, kind: str) -> list[torch.Tensor]:
    """Train with torch's own wrapper; return the parameters."""
    join(placement)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 9))
    if kind == "DDP":
        trained: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        trained = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        trained(torch.randn(8, 64, generator=random)).square().mean().backward()
        optimizer.step()
    found = [
        (each.full_tensor() if kind == "FSDP2" else each).detach() for each in model.parameters()
    ]
    dist.barrier()
    return found


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_torchs_wrappers_train(kind):
    (expected, *_) = run(train_with_torch, "aaaa", kind)
    first, *others = run(train_with_torch, "aabb", kind)
    for a, b in zip(first, expected, strict=True):
        torch.testing.assert_close(a, b)
    for other in others:
        assert all(a.equal(b) for a, b in zip(other, first, strict=True))


def open_things() -> tuple[int, int, int]:
    gc.collect()
    with open("/proc/self/maps") as maps:
        lines = sum("memfd:lockstep" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), lines, len(os.listdir("/proc/self/task"))


def come_and_go(placement: str) -> list[tuple[int, int, int]]:
    """Create, use and destroy groups; return what is open after the first ones and in the end."""
    join(placement)
    rank = dist.get_rank()
    n = dist.get_world_size()
    seen = []
    for number in range(12):
        group = dist.new_group(backend="lockstep")
        works = [dist.all_reduce(torch.ones(2), group=group, async_op=True)]
        works.append(dist.isend(torch.ones(50_000), (rank + 1) % n, group=group))
        dist.recv(torch.empty(50_000), (rank - 1) % n, group=group)
        for work in works:
            work.wait()
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group, work, works
        if number in (3, 11):
            seen.append(open_things())
    dist.barrier()
    return seen


@pytest.mark.stress
def test_groups_that_come_and_go_leave_nothing():
    for early, late in run(come_and_go, "aab"):
        assert early == late


WITHOUT_DESTROYING = """
import torch
import torch.distributed as dist

dist.init_process_group("lockstep")
rank, n = dist.get_rank(), dist.get_world_size()
sent = dist.isend(torch.ones(5), (rank + 1) % n)
dist.recv(torch.ones(5), (rank - 1) % n)
sent.wait()
dist.all_reduce(torch.ones(9), async_op=True).wait()
"""


@pytest.mark.stress
def test_a_program_may_exit_without_destroying_the_group():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for _ in range(3):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", WITHOUT_DESTROYING],
                env={
                    **os.environ,
                    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), IDENTITY: host},
                    **{"RANK": str(rank), "WORLD_SIZE": "3"},
                },
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate("aba")
        ]
        printed = [process.communicate(timeout=60)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0], printed


# ---- failures ----


def error_of(call: Callable[[], object]) -> tuple[float, str]:
    begun = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return time.monotonic() - begun, str(error)
    return time.monotonic() - begun, ""


def check_words(told: str) -> None:
    """Check that a message is ours: neither Gloo's text nor a stack."""
    for word in ("gloo", "pair.cc", "GLHF", "unbound_buffer", "\n"):
        assert word not in told.replace("backend gloo", ""), told


CALLS: dict[str, Callable[[int, int], object]] = {
    "all_reduce": lambda rank, n: dist.all_reduce(torch.ones(1 << 20)),
    "all_to_all": lambda rank, n: dist.all_to_all_single(torch.ones(4 * n), torch.ones(4 * n)),
    "barrier": lambda rank, n: dist.barrier(),
    "async": lambda rank, n: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "recv": lambda rank, n: dist.recv(torch.ones(3), n - 1 if rank < 2 else 0),
}


def die_while_others_wait(placement: str, operation: str, folder: str) -> None:
    join(placement)
    rank = dist.get_rank()
    n = dist.get_world_size()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends those that are left
    dist.barrier()
    if rank == n - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    seconds, told = error_of(lambda: CALLS[operation](rank, n))
    with open(f"{folder}/{rank}", "w") as notes:
        notes.write(f"{seconds:.3f} {told}")


@pytest.mark.parametrize(
    "operation",
    [pytest.param(name, marks=[pytest.mark.stress] * (name != "all_reduce")) for name in CALLS],
)
def test_a_dead_rank_of_another_host_is_named_by_all(operation, tmp_path):
    with pytest.raises(RankError, match="rank 3 was killed by SIGKILL"):
        run(die_while_others_wait, "aabb", operation, str(tmp_path))
    for rank in range(3):
        seconds, _, told = (tmp_path / str(rank)).read_text().partition(" ")
        assert float(seconds) < 5, told
        assert "rank 3 on host b closed its connection" in told
        check_words(told)


def watch_activity(seen: list[str]) -> None:
    """Note what the main thread waits for, once it waits."""
    until = time.monotonic() + 30
    while time.monotonic() < until and not seen:
        activity = read_own_activity()
        if activity.is_main_thread_waiting and "#2" in activity.operation:
            seen.append(activity.operation)
        threading.Event().wait(0.01)


def stay_away(placement: str) -> tuple[float, str]:
    join(placement, timeout=2.0)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == 3:
        until = time.monotonic() + 30
        while store.add("told", 0) < 3 and time.monotonic() < until:
            threading.Event().wait(0.05)
        return error_of(dist.barrier)
    seen: list[str] = []
    watching = threading.Thread(target=watch_activity, args=(seen,))
    if dist.get_rank() == 0:
        watching.start()
    told = error_of(lambda: dist.all_reduce(torch.ones(5)))
    store.add("told", 1)
    if dist.get_rank() == 0:
        watching.join()
        assert seen == ["all_reduce #2 on group default, waiting for the other ranks"]
    return told


def test_a_rank_that_does_not_come_ends_the_call_with_one_cause():
    answers = run(stay_away, "aabb")
    for seconds, told in answers[:3]:
        assert 1.9 <= seconds < 9
        check_words(told)
    causes = {told.partition(" failed: ")[2] for _, told in answers[:3]}
    assert len(causes) == 1
    assert "timed out after 2 s in all_reduce #2, waiting for the other ranks" in causes.pop()
    assert "timed out" in answers[3][1]  # who comes later learns why it is over


def call_while_refused(placement: str) -> str:
    join(placement)
    backend.refuse_calls("this is no time for it")
    _, told = error_of(lambda: dist.all_reduce(torch.ones(1)))
    backend.refuse_calls("")
    dist.barrier()
    return told


def test_calls_are_refused_as_on_one_host():
    for rank, told in enumerate(run(call_while_refused, "ab")):
        assert told.startswith(f"rank {rank}")
        assert told.endswith("is refused: this is no time for it")
