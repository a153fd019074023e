"""A group across hosts: bytes between them, groups inside them, and what happens when one fails.

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

SIZE = 300_000  # bytes of one tensor
CARDS = 4096  # bytes that a call may send in addition


def run(function: Callable[..., object], placement: str, *arguments: object) -> list:
    return pytest_lockstep.run(
        function, placement, *arguments, ranks=len(placement), timeout=60, init=False
    )


# ---- bytes ----


def sent_by_operation(placement: str) -> dict[str, dict[int, int]]:
    """Return what this rank sends to each rank, by operation."""
    group = join(placement)
    rank, n = dist.get_rank(), dist.get_world_size()
    tensor, tensors = torch.ones(SIZE // 4), [torch.ones(SIZE // 4) for _ in range(n)]
    outputs = [torch.empty(SIZE // 4) for _ in range(n)]
    is_root = rank == 1
    calls = {
        "broadcast": lambda: dist.broadcast(tensor, 1),
        "all_gather": lambda: dist.all_gather(outputs, tensor),
        "gather": lambda: dist.gather(tensor, outputs if is_root else None, 1),
        "scatter": lambda: dist.scatter(tensor, tensors if is_root else None, 1),
        "all_to_all": lambda: dist.all_to_all(outputs, tensors),
        "message": lambda: (
            dist.send(tensor, 0) if rank == n - 1 else rank or dist.recv(tensor, n - 1)
        ),
        "barrier": dist.barrier,
    }
    found = {}
    for name, call in calls.items():
        before = dict(group.between.sent)
        call()
        found[name] = {to: sent - before.get(to, 0) for to, sent in group.between.sent.items()}
    dist.barrier()
    return found


@pytest.mark.parametrize(
    "placement",
    ["aabb", *(pytest.param(each, marks=pytest.mark.stress) for each in ("abab", "aaab"))],
)
def test_no_byte_crosses_to_a_host_twice(placement):
    found = run(sent_by_operation, placement)
    on = {host: [r for r, each in enumerate(placement) if each == host] for host in "ab"}
    here = {host: len(ranks) for host, ranks in on.items()}
    root = placement[1]
    other = "b" if root == "a" else "a"
    # (from, to) -> tensors
    tensors = {
        "broadcast": {(root, other): 1},
        "all_gather": {("a", "b"): here["a"], ("b", "a"): here["b"]},
        "gather": {(other, root): here[other]},
        "scatter": {(root, other): here[other]},
        "all_to_all": dict.fromkeys([("a", "b"), ("b", "a")], here["a"] * here["b"]),
        "message": {("b", "a"): 1},
        "barrier": {},
    }
    for operation, expected in tensors.items():
        for pair in [("a", "b"), ("b", "a")]:
            sent = sum(
                found[source][operation].get(target, 0)
                for source in on[pair[0]]
                for target in on[pair[1]]
            )
            least = expected.get(pair, 0) * SIZE
            assert least <= sent <= least + CARDS, (operation, pair)


# ---- groups ----


def kinds_of_groups(placement: str) -> list[str]:
    join(placement)
    found = []
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 2, 3]):
        group = dist.new_group(ranks)
        if dist.get_rank() not in ranks:
            found.append("")
            continue
        made = group._get_backend(torch.device("cpu"))
        found.append(type(made).__name__)
        tensor = torch.ones(5)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [float(len(ranks))] * 5
        assert (backend.of_group(group) is None) == (backend.host_group_of(group) is not None)
    dist.barrier()
    return found


def test_a_group_inside_a_host_is_the_native_one():
    native, across = "LockstepBackend", "HostsBackend"
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


def request_backend(placement: str) -> str:
    """Request the backend in a world of several hosts, of which the last one does not have it."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = "1", "0"
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
    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = "1", "0"
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
def test_torchs_wrappers_train_with_the_bits_of_one_host(kind):
    expected = run(train_with_torch, "aaaa", kind)[0]
    for placement in ("aabb", "abab"):
        for found in run(train_with_torch, placement, kind):
            assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def open_things() -> tuple[int, int, int]:
    gc.collect()
    with open("/proc/self/maps") as maps:
        lines = sum("memfd:lockstep" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), lines, len(os.listdir("/proc/self/task"))


def come_and_go(placement: str) -> list[tuple[int, int, int]]:
    """Create, use and destroy groups; return what is open after the first ones and in the end."""
    join(placement)
    rank, n = dist.get_rank(), dist.get_world_size()
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
    "broadcast": lambda rank, n: dist.broadcast(torch.ones(1 << 20), n - 1),
    "all_to_all": lambda rank, n: dist.all_to_all_single(torch.ones(4 * n), torch.ones(4 * n)),
    "barrier": lambda rank, n: dist.barrier(),
    "async": lambda rank, n: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "recv": lambda rank, n: dist.recv(torch.ones(3), n - 1 if rank < 2 else 0),
    "any": lambda rank, n: dist.recv(torch.ones(3)),
}


def die_while_others_wait(placement: str, operation: str, folder: str) -> None:
    join(placement)
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    if rank == n - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    seconds, told = error_of(lambda: CALLS[operation](rank, n))
    with open(f"{folder}/{rank}", "w") as notes:
        notes.write(f"{seconds:.3f} {told}")


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(each, marks=[] if each in ("all_reduce", "any") else [pytest.mark.stress])
        for each in CALLS
    ],
)
def test_a_dead_rank_of_another_host_is_named_by_all(operation, tmp_path):
    with pytest.raises(RankError, match="rank 3 was killed by SIGKILL"):
        run(die_while_others_wait, "aabb", operation, str(tmp_path))
    for rank in range(3):
        seconds, _, told = (tmp_path / str(rank)).read_text().partition(" ")
        assert float(seconds) < 5, told
        assert "rank 3" in told
        check_words(told)


def watch_activity(seen: list[str]) -> None:
    """Note what the main thread waits for, once it waits for a rank of another host."""
    until = time.monotonic() + 30
    while time.monotonic() < until and not seen:
        found = read_own_activity()
        if found.is_main_thread_waiting and " on host b" in found.operation:
            seen.append(found.operation)
        threading.Event().wait(0.01)


def stay_away(placement: str) -> tuple[float, str]:
    join(placement, timeout=2.0)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == 3:
        busy_in_this_function(store)
        return error_of(dist.barrier)
    seen: list[str] = []
    watching = threading.Thread(target=watch_activity, args=(seen,))
    if dist.get_rank() == 0:
        watching.start()
    told = error_of(lambda: dist.all_reduce(torch.ones(5)))
    store.add("told", 1)
    if dist.get_rank() == 0:
        watching.join()
        assert seen == ["all_reduce #2 on group default, waiting for rank 2 on host b"], seen
    return told


def busy_in_this_function(store: dist.Store) -> None:
    until = time.monotonic() + 30
    while store.add("told", 0) < 3 and time.monotonic() < until:
        threading.Event().wait(0.05)


def test_a_rank_that_does_not_come_is_named_with_its_place():
    found = run(stay_away, "aabb")
    for seconds, told in found[:3]:
        assert 1.9 <= seconds < 9
        assert "rank 3" in told, told
        check_words(told)
    _, told = found[2]  # on the host of rank 3
    assert "now in test_backend.py:" in told
    assert "(busy_in_this_function)" in told
    assert "rank 2 timed out" in found[3][1]  # who comes later learns why it is over


def disagree(placement: str, kind: str) -> tuple[float, str]:
    join(placement)
    rank = dist.get_rank()
    dist.barrier()
    if kind == "operation":
        calls = [lambda: dist.all_reduce(torch.ones(4)), dist.barrier]
    elif kind == "size":
        # Receives are posted early; a message of the longer call must not match one of them.
        sizes = (4, 1 << 20)
        calls = [lambda size=size: dist.all_reduce(torch.ones(size)) for size in sizes]
    else:
        calls = [lambda size=size: dist.broadcast(torch.ones(size), 0) for size in (4, 5)]
    return error_of(calls[rank // 2])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("operation", "all_reduce(SUM, float32, 4 elements) as call #2"),
        ("size", "all_reduce(SUM, float32, 1048576 elements) as call #2"),
        ("broadcast", "bytes"),
    ],
)
def test_ranks_that_disagree_across_hosts_all_say_so(kind, words):
    for seconds, told in run(disagree, "aabb", kind):
        assert seconds < 5
        assert "disagree" in told
        assert words in told
        check_words(told)
