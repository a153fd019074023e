"""The backend "lockstep" beyond the contract: life and death, disagreement, memory, DDP, FSDP2."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep as ls
from lockstep.comm import backend
from lockstep.comm.memory import is_shared
from lockstep.errors import RankError

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


# ---- without an import ----


def test_the_name_is_known_without_an_import(tmp_path):
    script = (
        "import torch, torch.distributed as dist, sys\n"
        "assert 'lockstep.comm._native' not in sys.modules\n"
        "dist.init_process_group('lockstep', store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = torch.ones(3); dist.all_reduce(x); print(x.tolist())\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("[1.0, 1.0, 1.0]\n", "")


def test_an_extension_that_does_not_load_breaks_nothing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['lockstep.comm._native'] = None\n"
    )
    script = (
        "import torch, torch.distributed as dist\n"
        "try:\n"
        "    dist.init_process_group('lockstep', store=dist.HashStore(), rank=0, world_size=1)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert "the backend 'lockstep' can't be used here" in done.stdout
    assert "use the backend 'gloo'" in done.stdout


def test_a_limit_of_file_sizes_leaves_gloo(tmp_path):
    script = (
        "import lockstep as ls, torch.distributed as dist\n"
        "from lockstep.comm import backend\n"
        "print(ls.init().backend, backend.reason_unavailable())"
    )
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 100; exec {sys.executable} -c '{script}'"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.startswith("gloo no file may grow beyond 100 KiB (ulimit -f)"), done.stderr


# ---- death and silence ----


def die_while_others_wait(operation: str) -> str:
    rank, n = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "large": lambda: dist.all_reduce(torch.ones(1 << 20)),
        "async": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        # These two talk to each other, not to the one that dies.
        "recv": lambda: dist.recv(tensor, 1 - rank),
        "any": lambda: dist.recv(tensor),
        "send": lambda: dist.send(torch.ones(1 << 20), 1 - rank),
        "future": lambda: dist.irecv(tensor, 1 - rank).get_future().wait(),
    }
    assert n == 3
    told = error_of(calls[operation])
    with open(f"{os.environ['NOTES']}/{rank}", "w") as notes:
        notes.write(told)
    return told


@pytest.mark.parametrize(
    "operation", ["all_reduce", "large", "async", "recv", "any", "send", "future"]
)
def test_a_killed_rank_is_named_by_all_within_a_second(ranks, operation, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path))
    with pytest.raises(RankError, match="rank 2 was killed by SIGKILL"):
        ranks(die_while_others_wait, 3, operation, **on_lockstep)
    for rank in (0, 1):
        seconds, _, told = (tmp_path / str(rank)).read_text().partition(" ")
        assert float(seconds) < 1
        assert "rank 2 died" in told
        assert f"rank {rank}: " in told


def late() -> str:
    ls.init(backend="lockstep", timeout=1.0)
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


def test_a_rank_that_does_not_come_is_named_with_its_place():
    waited, came = ls.launch(late, nprocs=2, timeout=60.0)
    seconds, _, told = waited.partition(" ")
    assert 1 <= float(seconds) < 4
    assert "all_reduce #2 on group default failed: rank 0 waited 1." in told
    assert "for rank 1, last seen at #1 barrier, now in test_backend.py:" in told
    assert "(busy_in_this_function)" in told
    assert "rank 0 waited" in came  # who comes later learns why it is over


def test_the_deadline_holds_for_joining():
    store = dist.HashStore()
    told = error_of(
        lambda: dist.init_process_group(
            "lockstep", store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.3)
        )
    )
    assert "rank 1 did not join within 0.3 s" in told


# ---- disagreement ----


def disagree(kind: str) -> str:
    rank = dist.get_rank()
    tensor = torch.ones(4)
    calls = {
        "operation": (lambda: dist.all_reduce(tensor), lambda: dist.broadcast(tensor, 0)),
        "size": (lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(tensor[:3])),
        "dtype": (lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(tensor.double())),
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
    "kind", ["operation", "size", "dtype", "reduction", "root", "parts", "buffer"]
)
def test_ranks_that_disagree_learn_both_sides_at_once(ranks, kind):
    for rank, told in enumerate(ranks(disagree, 2, kind, **on_lockstep)):
        seconds, _, told = told.partition(" ")
        assert float(seconds) < 1
        assert f"rank {rank}: the ranks of group default disagree in call #1" in told
        assert "rank 0 called " in told
        assert "rank 1 called " in told
        assert told.count("in test_backend.py:") == 2


# ---- groups ----


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


# ---- messages ----


def to_oneself() -> list[float]:
    rank = dist.get_rank()
    values = []
    for numel in (1, 1_000_000):
        # torch's own calls refuse it before they ask the backend.
        group = dist.group.WORLD
        group.send([torch.full((numel,), float(rank))], rank, 4).wait()
        got = torch.empty(numel)
        group.recv([got], rank, 4).wait()
        values.append(got.mean().item())
    return values


def test_a_message_to_oneself_arrives(ranks):
    assert ranks(to_oneself, 2, **on_lockstep) == [[0.0, 0.0], [1.0, 1.0]]


def wrong_size() -> str:
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
        return ""
    return error_of(lambda: dist.recv(torch.empty(4), 0))


def test_a_message_of_another_size_is_refused(ranks):
    _, told = ranks(wrong_size, 2, **on_lockstep)
    assert "rank 0 sent 3 elements of float32, but the tensor to receive has 4" in told


def through_lanes() -> bool:
    rank, n = dist.get_rank(), dist.get_world_size()
    out = torch.arange(200_000.0) + rank
    got = torch.empty(200_000)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, out, (rank + 1) % n), dist.P2POp(dist.irecv, got, (rank - 1) % n)]
    )
    for work in works:
        work.wait()
    return torch.equal(got, torch.arange(200_000.0) + (rank - 1) % n)


@pytest.mark.parametrize("unreadable", ["", "1"])
def test_long_messages_arrive_where_memory_may_not_be_read(ranks, unreadable, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_NO_READ", unreadable)
    assert ranks(through_lanes, 3, **on_lockstep) == [True] * 3


# ---- memory ----


def shared_memory() -> list[object]:
    tensor = ls.empty(2, 3, dtype=torch.bfloat16)
    ordinary = torch.ones(6)
    big = ls.empty(100_000)
    big.fill_(dist.get_rank())
    dist.all_reduce(big)
    return [tensor.shape, tensor.dtype, is_shared(tensor), is_shared(ordinary), is_shared(big[5:]),
            big.unique().tolist()]  # fmt: skip


def test_empty_gives_a_tensor_in_shared_memory(ranks):
    expected = [torch.Size([2, 3]), torch.bfloat16, True, False, True, [3.0]]
    assert ranks(shared_memory, 3, **on_lockstep) == [expected] * 3


def test_memory_comes_back_when_a_tensor_goes():
    native = backend.load()
    before = native.heap_bytes()
    tensor = ls.empty(1000)
    view = tensor[10:]
    del tensor
    assert native.heap_bytes() >= before + 4000
    del view
    assert native.heap_bytes() == before


def test_too_much_memory_is_an_error():
    with pytest.raises(RuntimeError, match=r"there are not \d+ MiB of memory"):
        ls.empty(1 << 42)


# ---- torch's own users of a backend ----


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


def ddp_gradients(how: str) -> list[torch.Tensor]:
    rank = dist.get_rank()
    wrapped = nn.parallel.DistributedDataParallel(
        model(), bucket_cap_mb=0.02, gradient_as_bucket_view=True
    )
    data = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(data).square().mean().backward()
    if how == "lockstep":
        assert any(is_shared(p.grad) for p in wrapped.parameters())
    return [p.grad.clone() for p in wrapped.parameters()]


def test_ddp_reduces_in_shared_memory_and_agrees_with_gloo(ranks):
    """`lockstep.init` turns torch's switch, DDP_DISABLE_COMM_MEM, whose default is 1."""
    by_name = {name: ranks(ddp_gradients, 2, name, backend=name) for name in ("gloo", "lockstep")}
    for mine, theirs in zip(*by_name["lockstep"], strict=True):
        assert torch.equal(mine, theirs)
    for ours, gloos in zip(by_name["lockstep"][0], by_name["gloo"][0], strict=True):
        torch.testing.assert_close(ours, gloos)


def sharded() -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        data = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        net(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in net.parameters()]


def test_fsdp2_trains(ranks):
    ours, gloos = (ranks(sharded, 2, backend=name) for name in ("lockstep", "gloo"))
    for rank in ours:
        for mine, theirs in zip(rank, gloos[0], strict=True):
            torch.testing.assert_close(mine, theirs)


def functional() -> list[float]:
    import torch.distributed._functional_collectives as funcol

    tensor = torch.full((6,), float(dist.get_rank() + 1))
    total = funcol.all_reduce(tensor, "sum", dist.group.WORLD)
    whole = funcol.all_gather_tensor(tensor[:1], 0, dist.group.WORLD)
    part = funcol.reduce_scatter_tensor(tensor, "avg", 0, dist.group.WORLD)
    return [total[0].item(), whole.sum().item(), part[0].item()]


def test_functional_collectives(ranks):
    assert ranks(functional, 3, **on_lockstep) == [[6.0, 6.0, 2.0]] * 3


def detail() -> float:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor[0].item()


def test_torchs_debug_mode_works(ranks, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert ranks(detail, 2, **on_lockstep) == [2.0, 2.0]


# ---- bits ----


def bits_of_sums() -> list[list[int]]:
    found = []
    for numel in (5, 40_000):
        for place in (torch.empty, ls.empty):
            tensor = place(numel)
            generator = torch.Generator().manual_seed(dist.get_rank())
            tensor.copy_(torch.randn(numel, generator=generator) * 1e3)
            dist.all_reduce(tensor)
            found.append(tensor[:5].view(torch.int32).tolist())
    return found


def test_bits_are_the_same_on_every_rank_and_by_every_way(ranks, monkeypatch):
    first = ranks(bits_of_sums, 3, **on_lockstep)
    assert first[0] == first[1] == first[2]
    assert first[0][2] == first[0][3]
    monkeypatch.setenv("LOCKSTEP_KERNELS", "plain")
    monkeypatch.setenv("LOCKSTEP_SLOT_BYTES", "512")
    monkeypatch.setenv("LOCKSTEP_STAGE_BYTES", "1024")
    assert ranks(bits_of_sums, 3, **on_lockstep) == first
