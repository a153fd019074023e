"""The backend "lockstep" beyond the contract: its name, messages to oneself, tensors, bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import backend
from lockstep.comm.shared_memory import empty_shared, is_shared

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

on_lockstep = {"backend": "lockstep"}


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


def test_it_is_available_before_torch_is_imported(tmp_path):
    script = "from lockstep.comm import backend; print(backend.reason_unavailable())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_a_missing_binding_breaks_nothing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        "from lockstep.comm.native import binding\n"
        f"binding.PACKAGE_FOLDER = pathlib.Path({str(tmp_path)!r})\n"
        f"os.environ['XDG_CACHE_HOME'] = {str(tmp_path)!r}\n"
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
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])},
    )  # fmt: skip
    assert "the backend 'lockstep' is unavailable (use 'gloo' instead)" in done.stdout
    assert f"it has not been built for torch {torch.__version__} yet" in done.stdout
    assert done.stdout.endswith("run `lockstep build`\n")


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
    assert done.stdout.startswith("gloo the limit of 100 KiB for files also applies"), done.stderr


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


def through_lanes() -> bool:
    rank = dist.get_rank()
    n = dist.get_world_size()
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
    tensor = empty_shared(2, 3, dtype=torch.bfloat16)
    ordinary = torch.ones(6)
    big = empty_shared(100_000)
    big.fill_(dist.get_rank())
    dist.all_reduce(big)
    return [tensor.shape, tensor.dtype, is_shared(tensor), is_shared(ordinary), is_shared(big[5:]),
            big.unique().tolist()]  # fmt: skip


def test_empty_gives_a_tensor_in_shared_memory(ranks):
    expected = [torch.Size([2, 3]), torch.bfloat16, True, False, True, [3.0]]
    assert ranks(shared_memory, 3, **on_lockstep) == [expected] * 3


def test_memory_comes_back_when_a_tensor_goes():
    native = backend.load_native()
    before = native.heap_bytes()
    tensor = empty_shared(1000)
    view = tensor[10:]
    del tensor
    assert native.heap_bytes() >= before + 4000
    del view
    assert native.heap_bytes() == before


@pytest.mark.parametrize("size", [1 << 42, 1 << 58])  # more than memory, more than addresses
def test_too_much_memory_is_an_error(size):
    with pytest.raises(RuntimeError, match=r"^cannot (reserve|map) \d+ MiB of shared memory: "):
        empty_shared(size)


# ---- bits ----


def bits_of_sums() -> list[list[int]]:
    found = []
    for numel in (5, 40_000):
        for place in (torch.empty, empty_shared):
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
    monkeypatch.setenv("LOCKSTEP_STAGING_BYTES", "1024")
    assert ranks(bits_of_sums, 3, **on_lockstep) == first


def test_calls_that_are_refused_name_themselves_their_place_and_the_reason(ranks):
    def main():
        tensor = torch.ones(3)
        pair = dist.new_group([0, 1])
        said = []
        calls = [
            lambda: dist.all_reduce(tensor),
            lambda: dist.barrier(pair),
            lambda: dist.send(tensor, 1 - dist.get_rank()),
            lambda: dist.new_group([0, 1]),
        ]
        backend.refuse_calls("not now")
        for call in calls:
            with pytest.raises(backend.ArgumentError) as caught:
                call()
            said.append(str(caught.value))
        backend.refuse_calls("")
        dist.all_reduce(tensor)
        return said, tensor.tolist()

    for rank, (said, values) in enumerate(ranks(main, 2, backend="lockstep")):
        assert values == [2.0] * 3
        place = rf"rank {rank}, in test_backend.py:\d+ \(<lambda>\)"
        assert re.fullmatch(rf"{place}: all_reduce on group default is refused: not now", said[0])
        assert re.fullmatch(rf"{place}: barrier on group \S+ is refused: not now", said[1])
        assert re.fullmatch(rf"{place}: send on group default is refused: not now", said[2])
        assert said[3].startswith(f"rank {rank}: creating group ")


def test_a_barrier_that_waits_for_nobody_is_not_refused(world_of_one):
    backend.refuse_calls("not now")
    try:
        dist.barrier()
        with pytest.raises(backend.ArgumentError, match=r"broadcast .* is refused: not now"):
            dist.broadcast(torch.zeros(1), 0)
    finally:
        backend.refuse_calls("")
