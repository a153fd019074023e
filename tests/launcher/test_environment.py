"""Rank information from the variables of every launcher, and contradictions in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.errors import LaunchEnvironmentError
from lockstep.launcher.environment import (
    RankEnvironment,
    RankInfo,
    read_rank_info,
)

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_alone_without_variables():
    assert read_rank_info({"PATH": "/bin"}) == RankInfo()
    assert read_rank_info({"MASTER_ADDR": "somewhere", "MASTER_PORT": "1"}).launcher == "python"


def test_brackets_of_an_ipv6_address_are_left_out():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "[::1]", "MASTER_PORT": "29500"}
    assert read_rank_info(environ).master_addr == "::1"


def test_the_variables_of_a_rank_where_hosts_have_different_numbers_of_ranks():
    environment = RankEnvironment(1, "10.0.0.1", 29500, "x", nnodes=2, node_rank=1)
    expected = {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "1",
        "ROLE_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "3",
    }
    assert expected.items() <= environment.variables(0, (2, 3)).items()


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


def test_variables_set_manually_need_no_local_ones_on_the_loopback_interface():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert read_rank_info(environ) == RankInfo(1, 2, 1, 2, 0, "127.0.0.1", 1, "environment")


def test_without_local_variables_the_hosts_of_the_ranks_are_unknown():
    found = read_rank_info({"RANK": "1", "WORLD_SIZE": "2", **MEETING})
    assert found.unknown == ("local_rank", "local_world_size", "host")
    assert not found.is_single_host
    alone = read_rank_info({"RANK": "0", "WORLD_SIZE": "1", **MEETING})
    assert alone == RankInfo(0, 1, 0, 1, 0, "10.0.0.1", 29500, "environment")
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank_info({**given, **MEETING}).unknown == ("host",)
    assert read_rank_info({**given, **MEETING, "NODE_RANK": "1"}).host == 1  # Ray Train


def test_open_mpi_and_mpich_meet_at_a_port_of_the_launch_on_one_host():
    open_mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    found = read_rank_info(open_mpi)
    assert found == read_rank_info(mpich)
    assert found == RankInfo(1, 2, 1, 2, 0, "127.0.0.1", found.master_port, "mpiexec")
    named = [read_rank_info({**open_mpi, "PMIX_NAMESPACE": name}) for name in "aba"]
    assert named[0].master_port == named[2].master_port != named[1].master_port


RECORDED = Path(__file__).parent / "environments"
UNREAD_LAUNCHERS = ("blaunch", "jsrun", "kubeflow-trainer", "skypilot")
AGREED = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
# Of each launch: the launcher, and local rank, number of ranks on the host and index of the host of
# each rank; None where the launcher gives no such number.
PLACES: dict[str, tuple[str, list[tuple[int, int, int | None]]]] = {
    "torchrun-2-hosts": ("torchrun", [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)]),
    "open-mpi-1-host": ("mpiexec", [(0, 2, 0), (1, 2, 0)]),
    "open-mpi-2-hosts": ("mpiexec", [(0, 2, None), (1, 2, None), (0, 2, None), (1, 2, None)]),
    "open-mpi-2-hosts-by-node": (
        "mpiexec", [(0, 2, None), (0, 2, None), (1, 2, None), (1, 2, None)],
    ),
    "mpich-1-host": ("mpiexec", [(0, 2, 0), (1, 2, 0)]),
    "mpich-2-hosts": ("mpiexec", [(0, 2, None), (1, 2, None), (0, 2, None), (1, 2, None)]),
    "intel-mpi-1-host": ("mpiexec", [(0, 2, 0), (1, 2, 0)]),
    "intel-mpi-2-hosts": ("mpiexec", [(0, 2, None), (1, 2, None), (0, 2, None), (1, 2, None)]),
    "srun-1-host": ("srun", [(0, 2, 0), (1, 2, 0)]),
    "srun-2-hosts": ("srun", [(0, 3, 0), (1, 3, 0), (2, 3, 0), (0, 1, 1)]),
    "srun-2-hosts-3-tasks": ("srun", [(0, 2, 0), (1, 2, 0), (0, 1, 1)]),
    "srun-2-hosts-cyclic": ("srun", [(0, 3, 0), (0, 1, 1), (1, 3, 0), (2, 3, 0)]),
    "srun-pmi2-2-hosts": ("srun", [(0, 3, 0), (1, 3, 0), (2, 3, 0), (0, 1, 1)]),
    "pytorchjob": ("environment", [(None, None, None)] * 3),
    "ray-train": ("environment", [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)]),
}  # fmt: skip


def read_recorded(name):
    return json.loads((RECORDED / f"{name}.json").read_text())


@pytest.mark.parametrize("name", PLACES)
def test_recorded_environments(name):
    launcher, places = PLACES[name]
    environments = read_recorded(name)
    assert len(environments) == len(places)
    for rank, (environ, place) in enumerate(zip(environments, places, strict=True)):
        found = read_rank_info({**AGREED, **environ})
        assert (found.rank, found.world_size, found.launcher) == (rank, len(places), launcher)
        names = ("local_rank", "local_world_size", "host")
        expected = dict(zip(names, place, strict=True))
        assert found.unknown == tuple(name for name in names if expected[name] is None)
        for each in set(names) - set(found.unknown):
            assert getattr(found, each) == expected[each], (rank, each)


def test_every_recorded_environment_is_read():
    assert {path.stem for path in RECORDED.iterdir()} == {
        *PLACES,
        *UNREAD_LAUNCHERS,
        "sbatch-shell",
    }
    assert read_rank_info(read_recorded("sbatch-shell")[0]) == RankInfo()


@pytest.mark.parametrize("name", UNREAD_LAUNCHERS)
def test_a_process_of_another_launcher_is_an_error_and_not_a_world_of_one(name):
    for environ in read_recorded(name):
        with pytest.raises(LaunchEnvironmentError, match=r"lockstep run|MASTER_ADDR"):
            read_rank_info(environ)
        own = {"RANK": "0", "WORLD_SIZE": "1"}
        assert read_rank_info({**environ, **own}).launcher == "environment"


@pytest.mark.parametrize("nnodes", ["", "1", "1:1"])
def test_a_single_pod_is_a_world_of_one(nnodes):
    environ = {"PET_NNODES": nnodes, "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "4"}
    assert read_rank_info(environ) == RankInfo()


@pytest.mark.parametrize(
    ("name", "address", "port"),
    [
        ("srun-1-host", "127.0.0.1", range(20000, 32000)),
        ("srun-2-hosts", "gpu01", range(20000, 32000)),
        ("srun-pmi2-2-hosts", "gpu01", range(20000, 32000)),
        ("open-mpi-1-host", "127.0.0.1", range(20000, 32000)),
        ("mpich-1-host", "127.0.0.1", range(20000, 32000)),
        ("intel-mpi-1-host", "127.0.0.1", range(20000, 32000)),
        ("pytorchjob", "train-master-0", [23456]),
    ],
)
def test_the_address_of_the_store_follows_from_the_variables(name, address, port):
    found = {
        (info.master_addr, info.master_port) for info in map(read_rank_info, read_recorded(name))
    }
    assert len(found) == 1
    assert next(iter(found))[0] == address
    assert next(iter(found))[1] in port


@pytest.mark.parametrize("name", ["open-mpi-2-hosts", "mpich-2-hosts", "intel-mpi-2-hosts"])
def test_mpiexec_on_several_hosts_needs_an_address(name):
    environ = read_recorded(name)[1]
    with pytest.raises(LaunchEnvironmentError) as caught:
        read_rank_info(environ)
    message = str(caught.value)
    assert "on several hosts, but MASTER_ADDR is not set, and no variable of " in message
    assert "for example mpiexec -" in message
    with pytest.raises(LaunchEnvironmentError, match="MASTER_PORT is not set"):
        read_rank_info({**environ, "MASTER_ADDR": "a"})


def test_mpiexec_in_a_batch_job_uses_its_first_host():
    environ = read_recorded("mpich-2-hosts")[2]
    job = {**environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[07-09]"}
    first = read_rank_info(job)
    again = read_rank_info({**job, "SLURM_JOB_ID": "8"})
    assert first.master_addr == again.master_addr == "gpu07"
    assert first.master_port == read_rank_info(job).master_port != again.master_port


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
        ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK is 'one'", "set by torchrun and lockstep run"]),
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
        ({"PMI_RANK": "1"}, ["PMI_RANK is '1'", "PMI_SIZE is not set", "of MPICH"]),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,4"}, ["'4,4', 8 tasks", "NUM_TASKS is 7"]),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,x"}, ["'4,x'", "4(x2),3", "set by srun"]),
        ({**SRUN, "SLURM_NODEID": "2"}, ["SLURM_NODEID is 2", "'4,3', 2 hosts"]),
        ({**SRUN, "SLURM_LOCALID": "3"}, ["SLURM_LOCALID is 3", "has 3 of the 7 ranks"]),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu[1-"}, ["'gpu[1-'", "list of hosts"]),
        ({**SRUN, "SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST are not set"]),
    ],
)
def test_contradictions_name_variable_value_and_launcher(environ, words):
    with pytest.raises(LaunchEnvironmentError) as caught:
        read_rank_info(environ)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
