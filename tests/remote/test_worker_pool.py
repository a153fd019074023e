"""How drivers and workers end: closed, killed, garbage-collected; and who may connect."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist

import lockstep as ls
import processes
import warm
from lockstep.kernel.errors import RankError, UsageError
from lockstep.transport.connection import connect
from lockstep.transport.credentials import Credentials, Identity, Role
from lockstep.transport.frame import Frame, FrameSocket
from processes import alive

PATIENCE = 60.0
until = partial(processes.until, seconds=PATIENCE)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_worker_is_named_in_every_pending_call():
    with ls.Driver(nprocs=3, timeout=60) as driver:
        victim = driver.on(1).run(os.getpid)
        waiting = [driver.on(1).start(signal.pause) for _ in range(3)]
        asked = driver.on(0).create(list)
        os.kill(victim, signal.SIGKILL)
        for future in waiting:
            with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL") as caught:
                future.result(PATIENCE)
            assert (caught.value.rank, caught.value.status) == (1, -signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL, so it cannot be called"):
            driver.on(1).run(print)
        asked.append(1)  # the others still answer
        assert asked.get() == [1]
    assert not alive(victim)


def test_the_cause_is_named_and_not_its_consequence():
    def die_or_wait():
        if ls.rank() == 1:
            killed()
        dist.all_reduce(torch.ones(1))

    with (
        ls.Driver(nprocs=3, timeout=60) as driver,
        pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL"),
    ):
        driver.run(die_or_wait)


class Doomed:
    """Its owner dies of it."""

    def touch(self) -> None:
        killed()


class Held:
    """Something to hold."""


def held() -> int:
    return sum(type(thing).__name__ == "Held" for thing in gc.get_objects())


def test_a_death_is_reported_to_waiting_workers_and_frees_objects():
    with ls.Driver(nprocs=3, timeout=60) as driver:
        thing = driver.on(0).create(Held)
        shelf = driver.on(2).create(list)
        driver.on(2).run(lambda shelf, ref: shelf.append(ref), shelf, thing)
        del thing
        assert driver.on(0).run(held) == 1
        doomed = driver.on(2).create(Doomed)
        with pytest.raises(RankError, match="rank 2 was killed by SIGKILL"):
            driver.on(1).run(lambda ref: ref.touch(), doomed)
        assert driver.on(0).run(held) == 0


def test_close_ends_busy_workers_and_their_calls():
    with ls.Driver(nprocs=2, timeout=60) as driver:
        pids = driver.run(os.getpid)
        future = driver.on(1).start(signal.pause)
        counter = driver.on(0).create(list)
    assert not any(map(alive, pids))
    with pytest.raises(
        RankError, match="rank 1 had not returned from a call when the driver was closed"
    ):
        future.result()
    for late in (counter.get, lambda: driver.on(0)):
        with pytest.raises(UsageError, match="the driver is closed"):
            late()
    driver.close()  # once more is harmless


def test_workers_end_with_a_driver_that_is_garbage_collected():
    driver = ls.Driver(nprocs=2, timeout=60)
    pids = driver.run(os.getpid)
    assert all(map(alive, pids))
    del driver
    gc.collect()
    until(lambda: not any(map(alive, pids)), "workers outlived their driver")


SCRIPT = """
import os, signal, sys, time
import lockstep as ls
class Mine:
    def pid(self): return os.getpid()
driver = ls.Driver(nprocs=2, timeout=60)
print(*driver.run(os.getpid), driver.on(1).create(Mine).pid(), flush=True)
driver.on(0).start(signal.pause)
while sys.argv[1] == "wait": time.sleep(0.1)  # not pause(): it misses a signal just before it
"""


def test_workers_end_with_the_drivers_process():
    drivers = {
        end: warm.Popen(
            [sys.executable, "-c", SCRIPT, "exit" if end == "exit" else "wait"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for end in ("exit", "kill", "interrupt")
    }  # fmt: skip
    try:
        pids = {
            end: list(map(int, each.stdout.readline().split())) for end, each in drivers.items()
        }
        drivers["kill"].kill()
        drivers["interrupt"].send_signal(signal.SIGINT)
        said = {end: each.communicate(timeout=PATIENCE)[1] for end, each in drivers.items()}
    finally:
        for each in drivers.values():
            each.kill()
    for end, (first, second, asked) in pids.items():
        assert asked == second
        until(lambda both=(first, second): not any(map(alive, both)), f"left behind after {end}")
    assert {end: each.returncode for end, each in drivers.items()} == {
        "exit": 0,
        "kill": -signal.SIGKILL,
        "interrupt": -signal.SIGINT,
    }
    assert said["exit"] == said["kill"] == ""
    assert said["interrupt"].endswith("KeyboardInterrupt\n")


def what_is_told(end: socket.socket) -> bytes:
    end.settimeout(PATIENCE)
    try:
        return end.recv(1 << 10)
    except ConnectionResetError:
        return b""


def test_strangers_are_refused(capsys):
    with ls.Driver(nprocs=1, timeout=60) as driver:
        place = ("127.0.0.1", driver._pool.port)
        with socket.create_connection(place) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\x80\x04" * 100)
            assert what_is_told(stranger) == b""
        other = Credentials(b"w" * 32, Identity(Role.NODE_AGENT))
        with pytest.raises(UsageError, match="it holds another key: give both the same key"):
            connect(*place, other, Identity(Role.DRIVER), 60)
        with socket.create_connection(place):  # one that says nothing keeps nobody waiting
            assert driver.run(ls.rank) == [0]
    said = capsys.readouterr().err
    # In a line each, or in one together, as close as the two came.
    assert "127.0.0.1" in said
    assert "it is not a process of this version of Lockstep" in said
    assert "another key" in said


def test_a_second_worker_with_the_same_identity_is_refused(capsys):
    with ls.Driver(nprocs=1, timeout=60) as driver:
        pool = driver._pool
        own = replace(pool._credentials, own=Identity(Role.WORKER, 0, 0))
        wire = connect("127.0.0.1", pool.port, own, Identity(Role.DRIVER), 60)
        with wire.end:
            wire.send(Frame({"kind": "hello", "port": 1, "pid": 1}))
            while (received := frame_of(wire)) is not None:
                assert received.kind == "heartbeat"
        assert driver.run(ls.rank) == [0]
    said = capsys.readouterr().err
    assert "from 127.0.0.1 was refused: worker 0 of host 0 is connected already" in said


def frame_of(wire: FrameSocket) -> Frame | None:
    """Return the next frame, None at the end."""
    try:
        return wire.receive()
    except (EOFError, ConnectionResetError):
        return None


def redirect() -> None:
    """Let this worker find rank 2 where rank 1 should be, as someone on the path could."""
    (server,) = [thing for thing in gc.get_objects() if type(thing).__name__ == "WorkerServer"]
    server._peers[1] = (*server._peers[2][:2], *server._peers[1][2:])


def test_a_worker_does_not_answer_for_another_one():
    with ls.Driver(nprocs=3, timeout=60) as driver:
        shelves = [driver.on(rank).create(list) for rank in (1, 2)]
        driver.on(0).run(redirect)
        with pytest.raises(
            RankError, match=r"rank 1 cannot be called: worker 1 of host 0 .* it is"
        ):
            driver.on(0).run(lambda shelf: shelf.append(5), shelves[0])
        driver.on(0).run(lambda shelf: shelf.append(5), shelves[1])
        assert [shelf.get() for shelf in shelves] == [[], [5]]


def test_driver_and_workers_listen_on_the_loopback_interface_only():
    with ls.Driver(nprocs=2, timeout=60) as driver:
        pids = [os.getpid(), *driver.run(os.getpid)]
        places = {
            connection.laddr.ip
            for pid in pids
            for connection in psutil.Process(pid).net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        assert places == {"127.0.0.1"}


def test_the_key_is_not_on_a_command_line_or_in_an_environment(tmp_path):
    path = tmp_path / "driver.key"
    with ls.Driver(nprocs=1, key_file=path, timeout=60) as driver:
        key = path.read_text().strip()
        process = psutil.Process(driver.on(0).run(os.getpid))
        assert len(key) == 64
        for text in [*process.cmdline(), *process.environ().values()]:
            assert key not in text


def test_a_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"a driver cannot listen at 127.0.0.1:{port} here"):
            ls.Driver(listen=f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"nprocs": 0}, "at least one worker is needed"),
        ({"nprocs": -1, "remote": 2}, "at least one worker is needed"),
        ({"timeout": 0}, "expected a positive number of seconds"),
        ({"listen": "here:there"}, "listen here:there: expected HOST:PORT"),
        ({"listen": "no such host:0"}, "cannot listen at no such host:0 here"),
        ({"threads": 0}, "threads=0"),
        ({"backend": "pigeon"}, "torch has no backend 'pigeon'"),
    ],
)
def test_invalid_arguments(arguments, sentence):
    with pytest.raises(ls.LockstepError, match=sentence):
        ls.Driver(**arguments)
