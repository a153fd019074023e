"""How drivers and workers end: closed, killed, garbage-collected; and who may connect."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist

import lockstep as ls
import processes
import warm
from lockstep.comm.transport.secret import make_key
from lockstep.kernel.errors import RankError, UsageError
from lockstep.tools.remote.connection import connect_to_driver
from processes import alive

PATIENCE = 60.0
until = partial(processes.until, seconds=PATIENCE)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_worker_is_named_in_every_pending_call():
    with ls.Driver(nprocs=3, timeout=60) as driver:
        victim = driver.on(1).run(os.getpid)
        waiting = [driver.on(1).start(signal.pause) for _ in range(3)]
        os.kill(victim, signal.SIGKILL)
        for future in waiting:
            with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL") as caught:
                future.result(PATIENCE)
            assert (caught.value.rank, caught.value.status) == (1, -signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL, so it cannot be called"):
            driver.on(1).run(print)
        assert driver.on(0).run(ls.rank) == 0  # the others still answer
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


def test_close_ends_busy_workers_and_their_calls():
    with ls.Driver(nprocs=2, timeout=60) as driver:
        pids = driver.run(os.getpid)
        future = driver.on(1).start(signal.pause)
    assert not any(map(alive, pids))
    with pytest.raises(
        RankError, match="rank 1 had not returned from a call when the driver was closed"
    ):
        future.result()
    with pytest.raises(UsageError, match="the driver is closed"):
        driver.on(0)
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
driver = ls.Driver(nprocs=2, timeout=60)
print(*driver.run(os.getpid), flush=True)
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
            end: list(map(int, process.stdout.readline().split()))
            for end, process in drivers.items()
        }
        drivers["kill"].kill()
        drivers["interrupt"].send_signal(signal.SIGINT)
        said = {end: drivers[end].communicate(timeout=PATIENCE)[1] for end in drivers}
    finally:
        for process in drivers.values():
            process.kill()
    for end, both in pids.items():
        until(lambda both=both: not any(map(alive, both)), f"left behind after {end}")
    assert {end: process.returncode for end, process in drivers.items()} == {
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
        address = driver._pool.address
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\x80\x04" * 100)
            assert what_is_told(stranger) == b""
        with pytest.raises(UsageError, match="it holds another key: give both the same key"):
            connect_to_driver(*address, b"w" * 32, 60)
        with socket.create_connection(address):  # one that says nothing keeps nobody waiting
            assert driver.run(ls.rank) == [0]
    said = capsys.readouterr().err
    # In a line each, or in one together, as close as the two came.
    assert "127.0.0.1" in said
    assert "it is not a process of this version of Lockstep" in said
    assert "another key" in said


@pytest.mark.parametrize(
    ("host", "reason"),
    [(None, "worker 0 of its host is connected already"), ("ab" * 16, "waits for 0 more workers")],
    ids=["same name", "earlier driver"],
)
def test_a_worker_that_is_not_expected_is_refused(host, reason, tmp_path, capsys):
    key = make_key(tmp_path / "driver.key")
    with ls.Driver(nprocs=1, key_file=tmp_path / "driver.key", timeout=60) as driver:
        hello = {"kind": "hello", "host": host or driver._pool._roster.hosts[0], "index": 0}
        with connect_to_driver(*driver._pool.address, key, 60) as connection:
            connection.send({**hello, "workers": 1})
            while (answer := connection.receive(PATIENCE))["kind"] == "heartbeat":
                pass
        assert (answer["kind"], reason in answer["reason"]) == ("refused", True)
        assert driver.run(ls.rank) == [0]
    assert reason in capsys.readouterr().err


def test_driver_and_workers_listen_on_the_loopback_interface_only():
    with ls.Driver(nprocs=2, timeout=60) as driver:
        pids = [os.getpid(), *driver.run(os.getpid)]
        addresses = {
            connection.laddr.ip
            for pid in pids
            for connection in psutil.Process(pid).net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        assert addresses == {"127.0.0.1"}


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
