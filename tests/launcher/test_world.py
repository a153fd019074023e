"""Joining a world, and the errors of ranks that do not find each other."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.comm import backend
from lockstep.kernel.errors import LockstepError, RankError, RendezvousError, UsageError
from lockstep.launcher import late_ranks, rendezvous
from lockstep.launcher import world as joined
from lockstep.launcher.environment import JOIN, RankInfo, read_rank_info
from lockstep.launcher.failure_codes import is_lost_peer
from lockstep.launcher.world import (
    _explain,
    close_world_connections,
    cpu_backend,
    default_backend,
    leave_round,
    rejoin,
)
from lockstep.processor_core import divide_cores


@pytest.fixture
def alone():
    threads = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    yield
    ls.shutdown()
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_alone_is_a_world_of_one_in_which_collectives_work(alone):
    world = ls.init()
    assert (world.rank, world.world_size, world.host, world.backend) == (0, 1, 0, cpu_backend())
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1.0] * 3
    assert joined.world() is ls.init() is world
    assert torch.get_num_threads() == divide_cores(1)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_world_before_init_is_an_error():
    with pytest.raises(UsageError, match=r"call lockstep\.init\(\) first"):
        joined.world()
    assert (ls.rank(), ls.world_size(), joined.local_rank()) == (0, 1, 0)


def test_init_with_other_arguments_is_an_error(alone):
    ls.init(timeout=100)
    with pytest.raises(UsageError, match=r"timeout=100.*now.*timeout=200"):
        ls.init(timeout=200)
    ls.shutdown()
    assert ls.init(timeout=200).world_size == 1


def test_an_unknown_backend_is_an_error_that_names_the_available_ones(alone):
    with pytest.raises(UsageError, match=r"no backend 'glue' here; available: .*gloo"):
        ls.init(backend="cpu:gloo,cuda:glue")
    assert not dist.is_initialized()


@pytest.mark.parametrize("join", ["", "1"])
def test_an_unknown_backend_of_the_environment_is_such_an_error(alone, monkeypatch, join):
    monkeypatch.setenv("LOCKSTEP_BACKEND", "pigeon")
    monkeypatch.setenv(JOIN, join)
    with pytest.raises(UsageError, match=r"no backend 'pigeon' here; available: .*gloo"):
        ls.init()


@pytest.mark.skipif(not backend.available(), reason="the extension is not built here")
def test_one_rank_reports_that_the_fast_backend_is_unavailable():
    def join():
        import resource

        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        with redirect_stderr(io.StringIO()) as told:
            ls.init(timeout=30)
            ls.shutdown()
            world = ls.init(timeout=30)
        dist.all_reduce(torch.ones(3))
        return world.backend, told.getvalue()

    (name, told), other = ls.launch(join, nprocs=2, timeout=60)
    assert (name, other) == ("gloo", ("gloo", ""))
    assert told.count("\n") == 2
    assert "the number of threads, because the compiled backend is not available: the limit" in told
    assert "using the backend gloo, which is many times slower than" in told
    assert "the limit of 64 KiB for files also applies to shared memory: increase it" in told


def test_a_missing_backend_is_not_blamed_where_it_would_not_be_used(monkeypatch, capsys):
    monkeypatch.setattr(backend, "reason_unavailable", lambda: "it is not built: build it")
    monkeypatch.setattr("lockstep.launcher.world._explain", _explain.__wrapped__)
    cpu = torch.device("cpu")
    two = RankInfo(world_size=2, local_world_size=2)
    default_backend(cpu, two)
    assert "that is not available here: it is not built: build it\n" in capsys.readouterr().err
    for other in ({"rank": 1}, {"world_size": 1, "local_world_size": 1}):
        assert default_backend(cpu, replace(two, **other)) == "gloo"
    assert default_backend(cpu, replace(two, local_world_size=1)) == "lockstep"  # not decided yet
    for variable, value in (("LOCKSTEP_BACKEND", "gloo"), (JOIN, "1")):
        with monkeypatch.context() as context:
            context.setenv(variable, value)
            assert default_backend(cpu, two) == "gloo"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [{"threads": 0}, {"timeout": 0}])
def test_invalid_arguments(alone, arguments):
    with pytest.raises(UsageError, match=next(iter(arguments))):
        ls.init(**arguments)


def test_an_existing_process_group_is_adopted():
    def adopt():
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        world = ls.init()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return world.rank, world.world_size, world.backend, tensor.item()

    assert ls.launch(adopt, nprocs=2, timeout=60) == [(0, 2, "gloo", 2.0), (1, 2, "gloo", 2.0)]


def test_a_world_may_be_left_and_joined_again():
    def twice():
        sums = []
        for _ in range(3):
            ls.init(timeout=30)
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            sums.append(tensor.item())
            ls.shutdown()
        return sums, os.environ.get("GLOO_SOCKET_IFNAME")

    assert ls.launch(twice, nprocs=3, timeout=60) == [([3.0] * 3, None)] * 3


def wait_until_connections_are_closed() -> bool:
    """Return whether the wait for another rank ends with the loss of a peer."""
    rank = ls.init(backend="gloo", timeout=60).rank
    if rank == 2:
        close_world_connections()
        return True
    with pytest.raises(RuntimeError, match="by peer"):
        dist.recv(torch.empty(1), 2)
    if rank == 0:  # also where the connection to another rank is closed already
        threading.Thread(target=close_world_connections).start()
    with pytest.raises(RuntimeError) as caught:
        dist.recv(torch.empty(1), 1 - rank)
    return is_lost_peer(caught.value)


def test_closed_connections_end_the_waits_of_all_ranks():
    assert ls.launch(wait_until_connections_are_closed, nprocs=3, timeout=60) == [True] * 3


def join_after_a_round_that_failed(folder: Path) -> str:
    """Return the name of the group; rank 0 has failed to create another one before."""
    rank = ls.init().rank
    leave_round()
    if rank == 0:
        failing = dist.HashStore()
        keys = dist.PrefixStore("0//cpu/", failing)
        keys.set("lockstep/refused/0", "a member of the round has died")
        keys.set("lockstep/address/0", "")
        with pytest.raises(RendezvousError, match="a member of the round has died"):
            rejoin(failing, 0, 2)
    rejoin(dist.FileStore(str(folder / "store"), 2), rank, 2)
    dist.barrier()
    return str(dist.group.WORLD.group_name)


def test_a_rank_that_failed_to_join_a_round_joins_the_next_one_with_a_newcomer(tmp_path):
    """torch names groups by a count, which a failed creation left behind."""
    names = ls.launch(join_after_a_round_that_failed, (tmp_path,), 2, timeout=20)
    assert names == ["0", "0"]


def test_no_rank_of_gloo_has_joined_before_the_last_one(tmp_path):
    """Gloo connects ranks one by one: one that had left again would break off a slower one."""
    joined = tmp_path / "joined"

    def join() -> bool:
        connect = dist.init_process_group
        came = False

        def connect_slowly(*arguments, **options):
            nonlocal came
            connect(*arguments, **options)
            until = time.monotonic() + 0.5
            while not came and time.monotonic() < until:
                came = joined.exists()

        if os.environ["RANK"] == "0":
            dist.init_process_group = connect_slowly
        ls.init(backend="gloo", timeout=30)
        if ls.rank() == 1:
            joined.touch()
        ls.shutdown()
        return came

    assert ls.launch(join, nprocs=2, timeout=60) == [False, False]
    assert joined.exists()


def test_an_unknown_interface_is_an_error_that_names_it(alone, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RendezvousError, match=r"gloo could not connect them: .*nowhere0"):
        ls.init(backend="gloo", timeout=30)


def attempts(n, change, timeout=30.0):
    """Let every rank join with its variables changed, and return what it was told."""

    def attempt():
        os.environ.update(change(ls.rank()))
        late_ranks.NOTE_AFTER = 0.2
        try:
            ls.init(timeout=timeout)
        except LockstepError as error:
            return type(error).__name__, str(error)
        return "joined"

    return ls.launch(attempt, nprocs=n, timeout=60)


def test_a_rank_that_exists_twice_is_an_error_on_every_rank():
    told = attempts(3, lambda rank: {"RANK": "1", "LOCAL_RANK": "1"} if rank == 2 else {})
    assert len(set(told)) == 1
    kind, sentence = told[0]
    assert kind == "LaunchEnvironmentError"
    assert sentence.startswith("two processes are rank 1: process ")


def test_another_world_size_is_an_error_on_every_rank():
    told = attempts(3, lambda rank: {"WORLD_SIZE": "4"} if rank == 2 else {})
    assert len(set(told)) == 1
    assert told[0][0] == "LaunchEnvironmentError"
    assert " ranks according to rank " in told[0][1]
    assert "start every rank with the same WORLD_SIZE" in told[0][1]


def test_missing_ranks_are_named_while_waiting_and_at_the_timeout(capfd):
    told = attempts(2, lambda rank: {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, timeout=1.5)
    assert all(kind == "RendezvousError" for kind, _ in told)
    words = "ranks 2 and 3 of 4 did not join within"
    assert all(sentence.startswith(words) for _, sentence in told)
    assert len({sentence for _, sentence in told}) == 1
    notes = [line for line in capfd.readouterr().err.splitlines() if "has waited" in line]
    assert len(notes) == 1
    assert notes[0].startswith("lockstep: rank 0 has waited")
    assert "for ranks 2 and 3 of 4" in notes[0]


def test_an_unknown_master_address_is_an_error_at_once():
    told = attempts(2, lambda rank: {"MASTER_ADDR": "no-such-host.invalid"})
    assert {kind for kind, _ in told} == {"UsageError"}
    assert all("MASTER_ADDR is 'no-such-host.invalid'" in sentence for _, sentence in told)


def test_a_master_that_does_not_answer_is_reported_while_waiting_and_at_the_timeout(capfd):
    with socket.socket() as unused:  # bound and not listening: nobody else gets this port
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        change = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        told = attempts(2, lambda rank: change, timeout=1.5)
    assert {kind for kind, _ in told} == {"RendezvousError"}
    assert all(f"no answer from 127.0.0.1:{port}" in sentence for _, sentence in told)
    assert all("connection refused" in sentence for _, sentence in told)
    assert "no answer from 127.0.0.1" in capfd.readouterr().err


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400 Bad Request\r\n\r\n", b""])
def test_another_program_at_the_port_of_the_master_is_named(monkeypatch, capfd, answer):
    monkeypatch.setattr(late_ranks, "NOTE_AFTER", 0.0)
    monkeypatch.setattr(rendezvous, "GREET_TIMEOUT", 0.2)
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as foreign:
        foreign.settimeout(30)
        port = foreign.getsockname()[1]
        rank_info = RankInfo(rank=1, world_size=2, master_addr="127.0.0.1", master_port=port)
        joining = pool.submit(rendezvous.wait_for_ranks, rank_info, 0.5)
        with foreign.accept()[0] as connection:
            connection.settimeout(30)
            assert connection.recv(100)
            connection.sendall(answer)
            error = joining.exception(timeout=30)
    assert isinstance(error, RendezvousError)
    where = f"rank 1: no answer from 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT)"
    assert str(error).startswith(where)
    assert str(error).endswith("choose another port with --master-port (MASTER_PORT) on every host")
    printed = capfd.readouterr().err
    assert "frame #" not in printed
    assert f"lockstep: {where} for 0 s" in printed


@pytest.mark.parametrize("is_uv", [True, False])
def test_a_store_of_torch_answers_the_greeting(is_uv):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=is_uv)
    with socket.create_connection(("127.0.0.1", store.port)) as connection:
        connection.settimeout(30)
        connection.sendall(rendezvous.GREETING)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == rendezvous.PING_NUMBER
    assert rendezvous._try_address("127.0.0.1", store.port, time.monotonic() + 30) is None


def test_why_no_store_answers_is_a_code():
    found = rendezvous._try_address("127.0.0.1", 1, time.monotonic() + 30)
    assert found == ("refused", "connection refused")


@pytest.mark.timeout(20)
def test_a_failed_rank_does_not_wait_long_for_a_store_that_was_cut_off(monkeypatch):
    is_over = threading.Event()

    class SilentStore:
        def add(self, key, number):
            is_over.wait()
            return number

    state = rendezvous.ProcessState
    monkeypatch.setattr(state, "store", SilentStore())
    monkeypatch.setattr(state, "rank_info", RankInfo(rank=1, world_size=2, master_addr="b"))
    monkeypatch.setattr(state, "is_private", False)
    monkeypatch.setattr(rendezvous, "LEAVE_TIMEOUT", 600.0)
    monkeypatch.setattr(rendezvous, "FAILED_TIMEOUT", 0.01)
    monkeypatch.setattr(rendezvous, "get_exit_code", lambda: 7)
    rendezvous.leave_store()
    is_over.set()


def test_a_port_in_use_is_an_error_on_the_rank_that_serves():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        change = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        told = attempts(1, lambda rank: change)
    assert told[0][0] == "UsageError"
    assert f"port {port} at 127.0.0.1 is in use" in told[0][1]


def test_ranks_that_were_started_manually_meet_without_a_launcher(capfd):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    change = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert attempts(3, lambda rank: change) == ["joined"] * 3


def test_ranks_without_local_variables_find_out_who_shares_their_host(capfd):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def join():
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            del os.environ[name]
        # Not one of the names of the loopback interface, so the hosts are unknown at first.
        os.environ.update(MASTER_ADDR="127.0.0.2", MASTER_PORT=port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        assert read_rank_info(os.environ).unknown
        world = ls.init(timeout=30)
        return world.local_rank, world.local_world_size, world.host, world.backend

    backend = cpu_backend()
    assert ls.launch(join, nprocs=3, timeout=60) == [(rank, 3, 0, backend) for rank in range(3)]


def test_a_rank_that_never_joins_is_named_before_the_timeout():
    def join():
        if ls.rank() != 1:
            ls.init(timeout=60)

    with pytest.raises(RankError, match=r"^rank 1 returned without joining the world, while rank"):
        ls.launch(join, nprocs=3, timeout=30)


@pytest.mark.parametrize("names", [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
])  # fmt: skip
def test_ranks_of_mpiexec_meet_at_a_port_of_the_launch(names):
    def join():
        rank = os.environ["RANK"]
        size = os.environ["WORLD_SIZE"]
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ.update(zip(names, (rank, size, rank, size), strict=True))
        world = ls.init(timeout=30)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return world.rank, tensor.item()

    assert ls.launch(join, nprocs=3, timeout=60) == [(0, 3.0), (1, 3.0), (2, 3.0)]
