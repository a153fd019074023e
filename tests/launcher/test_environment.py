"""Rank information from the variables of every launcher, and contradictions in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import LaunchEnvironmentError
from lockstep.launcher.environment import (
    RankEnvironment,
    RankInfo,
    first_host,
    read_rank_info,
)

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_alone_without_variables():
    assert read_rank_info({"PATH": "/bin"}) == RankInfo()
    assert read_rank_info({"MASTER_ADDR": "somewhere", "MASTER_PORT": "1"}).launcher == "python"


def test_brackets_of_an_ipv6_address_are_left_out():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "[::1]", "MASTER_PORT": "29500"}
    assert read_rank_info(environ).master_addr == "::1"


@given(nprocs=st.integers(1, 9), hosts=st.integers(1, 9), data=st.data())
def test_a_rank_reads_what_the_launcher_wrote(nprocs, hosts, data):
    host = data.draw(st.integers(0, hosts - 1))
    local_rank = data.draw(st.integers(0, nprocs - 1))
    environment = RankEnvironment(nprocs, "10.0.0.1", 29500, "x", nnodes=hosts, node_rank=host)
    assert read_rank_info(environment.variables(local_rank)) == RankInfo(
        rank=host * nprocs + local_rank,
        world_size=nprocs * hosts,
        local_rank=local_rank,
        local_world_size=nprocs,
        host=host,
        master_addr="10.0.0.1",
        master_port=29500,
        launcher="lockstep",
    )


def test_torchrun():
    local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    environ = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", **local, **MEETING}
    found = read_rank_info(environ)
    assert found == RankInfo(3, 4, 1, 2, 1, "10.0.0.1", 29500, "torchrun")


def test_variables_set_manually_need_no_local_ones():
    found = read_rank_info({"RANK": "1", "WORLD_SIZE": "2", **MEETING})
    assert (found.local_rank, found.local_world_size, found.host) == (1, 2, 0)
    assert found.launcher == "environment"


def test_open_mpi_and_mpich_use_a_file_on_one_host():
    open_mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    expected = RankInfo(1, 2, 1, 2, 0, None, None, "mpiexec")
    assert read_rank_info(open_mpi) == read_rank_info(mpich) == expected
    assert expected.is_loopback


SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77",
        "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NODELIST": "gpu[03-05,9]"}  # fmt: skip


def test_srun_uses_the_first_host_and_a_port_of_the_job():
    found = read_rank_info(SRUN)
    assert (found.rank, found.world_size, found.local_rank) == (5, 7, 1)
    assert (found.local_world_size, found.host, found.launcher) == (3, 1, "srun")
    assert found.master_addr == "gpu03"
    assert found.master_port == read_rank_info({**SRUN, "SLURM_PROCID": "0"}).master_port
    assert found.master_port != read_rank_info({**SRUN, "SLURM_JOB_ID": "78"}).master_port


@pytest.mark.parametrize("step", [None, "4294967290", "4294967291", "4294967292"])
def test_a_shell_in_an_allocation_is_a_world_of_one(step):
    environ = {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}
    assert (
        read_rank_info(environ if step is None else {**environ, "SLURM_STEP_ID": step})
        == RankInfo()
    )


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu[03-05,9],c1", "gpu03"), ("a", "a"), ("a,b", "a"), ("n[1,3]-ib", "n1-ib")],
)
def test_first_host_of_a_slurm_node_list(hosts, first):
    assert first_host(hosts) == first


def test_variables_of_lockstep_take_precedence_over_those_of_srun():
    assert (
        read_rank_info({**SRUN, **RankEnvironment(2, "127.0.0.1", 1, "x").variables(1)}).rank == 1
    )


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "2"}, ["RANK is '2'", "WORLD_SIZE is not set", "unset RANK"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE is '2'", "RANK is not set"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK is '1'", "RANK is not set"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK is 4", "WORLD_SIZE is 4", "from 0 to 3"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE is 0"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK is '-1'", "integer of at least 0"]),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK is 'one'", "torchrun and lockstep run set it"]),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["MASTER_ADDR is not set"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, ["MASTER_PORT is not set"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, ["MASTER_PORT is 70000"]),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2", **MEETING},
            ["LOCAL_RANK is 2", "has 2 of the 2 ranks"],
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3", **MEETING},
            ["LOCAL_WORLD_SIZE is 3", "WORLD_SIZE is 2"],
        ),
        ({"PMI_RANK": "1"}, ["PMI_RANK is '1'", "PMI_SIZE is not set", "MPICH's mpiexec"]),
    ],
)
def test_contradictions_name_variable_value_and_launcher(environ, words):
    with pytest.raises(LaunchEnvironmentError) as caught:
        read_rank_info(environ)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
