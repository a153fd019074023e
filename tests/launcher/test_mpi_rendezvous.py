"""The ranks of MPI find each other without variables; other backends see no difference."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import _env_rendezvous_handler
from torch.distributed.rendezvous import _rendezvous_handlers as handlers

import hosts
import lockstep as ls
import mpi_ranks
from lockstep.launcher import mpi_rendezvous


def add(number):
    tensor = torch.full((3,), float(number))
    dist.all_reduce(tensor)
    return tensor.tolist()


def worlds():
    """Join four worlds, one after the other, in the ways that there are."""
    mpi_rendezvous.register()
    timeout = timedelta(seconds=30)
    found = []
    for arguments in ({}, {"init_method": "env://"}):
        dist.init_process_group("mpi4py", timeout=timeout, **arguments)
        found.append((dist.get_rank(), dist.get_world_size(), add(dist.get_rank() + 1)))
        dist.destroy_process_group()
    for backend in ("mpi4py", None):
        os.environ["LOCKSTEP_BACKEND"] = "mpi4py"
        world = ls.init(backend=backend, timeout=30)
        assert (world.backend, world.local_rank, world.host) == ("mpi4py", world.rank, 0)
        found.append((world.rank, world.world_size, add(world.rank + 1)))
        ls.shutdown()
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "1"
    for join in (lambda: dist.init_process_group("mpi4py"), lambda: ls.init(backend="mpi4py")):
        with pytest.raises(ls.errors.LaunchEnvironmentError, match="unset RANK and WORLD_SIZE"):
            join()
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    with pytest.raises(ls.errors.LaunchEnvironmentError, match="process is rank 7 of 2"):
        dist.init_process_group("mpi4py", rank=7)
    with pytest.raises(ValueError, match="RANK expected, but not set"):
        dist.init_process_group("gloo")
    return found


@mpi_ranks.needed
def test_worlds_without_variables():
    for rank, found in enumerate(mpi_ranks.run(worlds, ranks=2)):
        assert found == [(rank, 2, [3.0] * 3)] * 4


def receive_addresses():
    from lockstep.comm.mpi import library

    mpi = library.load()
    addresses = json.dumps([f"fd00::{number:x}" for number in range(1000)])
    text = addresses if mpi.COMM_WORLD.Get_rank() == 0 else ""
    return mpi_rendezvous._broadcast(mpi, text, time.monotonic() + 30) == addresses


@mpi_ranks.needed
def test_rank_0_may_have_many_addresses():
    assert mpi_ranks.run(receive_addresses, ranks=2) == [True, True]


def test_rendezvous_is_registered_once():
    mpi_rendezvous.register()
    first = handlers["env"]
    mpi_rendezvous.register()
    assert handlers["env"] is first
    assert first.args == (_env_rendezvous_handler,)


PROGRAM = """
import torch, torch.distributed as dist
import lockstep as ls
from lockstep.launcher import mpi_rendezvous
mpi_rendezvous.register()
dist.init_process_group("mpi4py")
tensor = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
rank = dist.get_rank()
dist.barrier()
dist.destroy_process_group()
world = ls.init(backend="mpi4py", timeout=30)
print(f"rank {rank} has {tensor.tolist()}; rank {world.local_rank} of host {world.host}\\n", end="")
"""


@mpi_ranks.needed
@pytest.mark.stress
def test_ranks_of_two_hosts(tmp_path):
    """Let mpiexec on one simulated host start ranks on both; the store needs MPI's secret."""
    with hosts.network("a", "b") as network:
        remote = tmp_path / "remote"
        cases = [
            f'{host.address}) exec {" ".join(host.namespaces.command)} sh -c "$*" ;;'
            for host in (network.a, network.b)
        ]
        skip = 'while [ "${1#-}" != "$1" ]; do shift; done; host=$1; shift; case $host in'
        remote.write_text("\n".join(["#!/bin/sh", skip, *cases, "esac", ""]))
        remote.chmod(0o700)
        where = f"{network.a.address},{network.b.address}"
        started = ["-launcher", "ssh", "-launcher-exec", str(remote), "-hosts", where]
        command = [mpi_ranks.mpiexec(), *started, "-ppn", "2", "-n", "4", sys.executable, "-c"]
        with network.a.popen(
            [*command, PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            printed, _ = process.communicate(timeout=100)
    assert process.returncode == 0, printed
    for rank in range(4):
        assert f"rank {rank} has [10.0, 10.0, 10.0]; rank {rank % 2} of host {rank // 2}" in printed
