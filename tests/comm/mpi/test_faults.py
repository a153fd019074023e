"""Ranks of MPI that do not come, end early, or pass tensors that do not fit."""

import gc
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
import mpi_ranks
import pytest_lockstep

pytestmark = mpi_ranks.needed
PATIENCE = 30.0


def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None


def wait_until(is_true):
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def late():
    """Let rank 1 come to an operation after rank 0's patience, and rank 0 end its group before."""
    from lockstep.comm.mpi.exited_ranks import exited_ranks
    from lockstep.comm.mpi.work import unfinished

    ls.init(backend="mpi4py", timeout=PATIENCE)
    rank, store = ls.rank(), dist.distributed_c10d._get_default_store()
    said = {}
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    if rank == 0:
        said["late"] = error_of(lambda: dist.all_reduce(torch.ones(3), group=group))
        said["again"] = error_of(lambda: dist.barrier(group=group))
        said["pending"] = unfinished()
        store.set("late", "")
        wait_until(lambda: not unfinished())
    else:
        store.wait(["late"])
        dist.all_reduce(torch.ones(3), group=group)
    future_group = dist.new_group(timeout=timedelta(seconds=0.2))
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=future_group, async_op=True)
        said["future"] = error_of(work.get_future().wait)
        store.set("future", "")
        wait_until(lambda: not unfinished())
    else:
        store.wait(["future"])
        dist.all_reduce(torch.ones(3), group=future_group)
    if rank == 0:
        missing = partial_group(store)
        said["group"] = error_of(missing)
    dist.barrier()

    import lockstep.comm.mpi.exited_ranks as module

    module.INTERVAL = module.GRACE = 0.05
    last_group = dist.new_group()
    if rank == 0:
        said["ended"] = error_of(lambda: dist.recv(torch.ones(1), 1, group=last_group))
        store.set("received", "")
        wait_until(lambda: not unfinished())
    else:
        exited_ranks.announce(1)
        store.wait(["received"])
        dist.send(torch.ones(1), 0, group=last_group)
    threads = [thread.name for thread in threading.enumerate()]
    return said, threads


def partial_group(store):
    """Return a call that creates a group which rank 1 does not join."""
    from lockstep.comm.mpi import backend as mpi_backend

    class Options:
        group_rank, group_size, global_ranks_in_group = 0, 2, (0, 1)
        group_id, timeout = "half", timedelta(seconds=0.2)

    Options.store = dist.PrefixStore("half", store)
    return lambda: mpi_backend.create(Options)


def test_ranks_that_do_not_come():
    (said, _), (nothing, _) = mpi_ranks.run(late, ranks=2)
    assert not nothing
    assert "rank 0: all_reduce in test_faults.py:" in said["late"]
    assert "did not complete within 0.2 s: another rank has not called it" in said["late"]
    assert "the group cannot be used any more, because rank 0: all_reduce" in said["again"]
    assert said["pending"]
    assert "rank 0: all_reduce did not complete within 0.2 s" in said["future"]
    assert said["group"] == "rank 0: rank 1 did not create group half within 0.2 s"
    assert "rank 0: recv from rank 1 in test_faults.py:" in said["ended"]
    assert "cannot complete, because rank 1 ended without it" in said["ended"]


def mistakes():
    ls.init(backend="mpi4py", timeout=PATIENCE)
    rank, other = ls.rank(), 1 - ls.rank()
    world = dist.group.WORLD
    work = dist.isend(torch.ones(2), other)
    said = {"size": error_of(lambda: dist.recv(torch.ones(3), other))}
    work.wait()
    work = dist.isend(torch.ones(4), other)
    said["long"] = error_of(lambda: dist.recv(torch.ones(3), other))
    work.wait()
    said["tag"] = error_of(lambda: world.send([torch.ones(1)], other, 1 << 40))
    said["device"] = error_of(lambda: world.allreduce([torch.ones(1, device="meta")]))
    pid = os.fork()
    if pid == 0:
        found = error_of(lambda: dist.all_reduce(torch.ones(1))) or ""
        os._exit(0 if "is a fork of the rank" in found else 1)
    said["fork"] = os.waitpid(pid, 0)[1]
    dist.destroy_process_group()
    gc.collect()
    said["destroyed"] = error_of(lambda: world.allreduce([torch.ones(1)]))
    return rank, said


def test_mistakes_have_one_sentence():
    for rank, said in mpi_ranks.run(mistakes, ranks=2):
        who = f"rank {rank}: "
        assert said["size"].startswith(f"{who}recv from rank {1 - rank} failed: the message from ")
        assert "has 2 elements of 4 bytes, and the tensor 3" in said["size"]
        assert said["long"].endswith("the message has more elements than the tensor")
        assert said["tag"].startswith(f"{who}send: the tag is 1099511627776, but MPICH 5")
        assert said["device"].startswith(f"{who}all_reduce: the tensor is on meta")
        assert said["fork"] == 0
        assert said["destroyed"] == f"{who}the process group is destroyed"


def launched_otherwise():
    with pytest.raises(ls.errors.LaunchEnvironmentError) as raised:
        ls.init(backend="mpi4py", timeout=PATIENCE)
    return str(raised.value)


def test_launcher_must_be_mpiexec():
    found = pytest_lockstep.run(launched_otherwise, ranks=2, init=False)
    assert found[1].startswith("rank 1 of 2 is alone in MPICH")
    assert "mpiexec -n 2 python SCRIPT" in found[1]


PROGRAM = """
import sys, torch, torch.distributed as dist
from lockstep.launcher import mpi_rendezvous
mpi_rendezvous.register()    # torch calls it if this version of torch-lockstep is installed
assert "mpi4py.MPI" not in sys.modules
dist.init_process_group("mpi4py")
tensor = torch.ones(3)
dist.all_reduce(tensor)
with open(f"rank-{dist.get_rank()}-of-{dist.get_world_size()}", "w") as file:
    print(tensor.tolist(), file=file)   # mpiexec drops what it has not read when a rank ends
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("no more")
dist.all_reduce(tensor)
"""


def test_program_of_torch_under_mpiexec_ends_with_the_rank_that_raises(tmp_path):
    """Run real ranks, without variables: the rank that raises ends the one that waits for it."""
    command = [mpi_ranks.mpiexec(), "-n", "2", sys.executable, "-c", PROGRAM]
    with mpi_ranks.removing_segments():
        found = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
    assert found.returncode == 1, found.stderr
    for rank in (0, 1):
        assert (tmp_path / f"rank-{rank}-of-2").read_text() == "[2.0, 2.0, 2.0]\n"
    assert "ValueError: no more" in found.stderr
    sentence = "lockstep: rank 1 of 2 raised ValueError and ends the other ranks (MPI_Abort)"
    assert sentence in found.stderr
