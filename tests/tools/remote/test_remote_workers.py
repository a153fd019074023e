"""Workers that connect: `lockstep worker --connect`, here on the same host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import psutil
import pytest
import torch
import torch.distributed as dist

import lockstep as ls
import warm
from lockstep.comm.transport.secret import KEY_VARIABLE, make_key
from lockstep.kernel.errors import RankError, RendezvousError
from lockstep.launcher import world as joined

WORKER = [*warm.LOCKSTEP, "worker"]
PATIENCE = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def connect(tmp_path, endpoint):
    """Start `lockstep worker` commands, and end what is left of them."""
    started = []

    def start(*arguments: str, **options) -> subprocess.Popen:
        started.append(
            warm.Popen(
                [*WORKER, "--connect", endpoint, *arguments],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, **options,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for worker in started:
        worker.kill()
        worker.communicate()


def all_reduced() -> tuple[str, int, float]:
    tensor = torch.tensor(float(ls.rank() + 1))
    dist.all_reduce(tensor)
    return os.environ["GROUP_RANK"], joined.local_rank(), tensor.item()


def test_local_and_remote_workers_are_one_world(connect, endpoint, tmp_path):
    key = str(tmp_path / "driver.key")
    make_key(key)
    worker = connect("-n", "2", "--key-file", key)
    with ls.Driver(nprocs=1, remote=2, listen=endpoint, key_file=key, timeout=PATIENCE) as driver:
        assert driver.run(all_reduced) == [("0", 0, 6.0), ("1", 0, 6.0), ("1", 1, 6.0)]
        pids = driver.run(os.getpid)
        assert {psutil.Process(pid).pid for pid in pids[1:]} <= {
            child.pid for child in psutil.Process(worker.pid).children(recursive=True)
        }
        future = driver.on(2).start(os.kill, pids[2], signal.SIGKILL)
        with pytest.raises(RankError, match=r"^rank 2 closed the connection"):
            future.result(PATIENCE)
        driver.on(1).run(print, "from afar")
    assert worker.wait(PATIENCE) == 1
    assert worker.stdout.read() == "from afar\n"
    assert "rank 1 was killed by SIGKILL" in worker.stderr.read()
    assert not any(map(psutil.pid_exists, pids))


def test_another_key_is_refused_and_reported_on_both_sides(connect, endpoint, capsys):
    with ls.Driver(nprocs=1, listen=endpoint, timeout=PATIENCE) as driver:
        worker = connect(env={**os.environ, KEY_VARIABLE: "ab" * 32})
        assert worker.wait(PATIENCE) == 1
        assert driver.run(ls.rank) == [0]
    assert "refused the connection: it holds another key" in worker.stderr.read()
    assert "was refused: it holds another key" in capsys.readouterr().err


def test_the_error_counts_workers_that_did_not_connect(endpoint):
    with pytest.raises(
        RendezvousError, match="0 of 2 workers connected in time: .*--connect " + endpoint
    ):
        ls.Driver(nprocs=0, remote=2, listen=endpoint, timeout=0.2)


def test_without_a_driver_or_a_key(connect, endpoint):
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    keyless = connect(env=environment)
    alone = connect("--timeout", "0.5", env={**environment, KEY_VARIABLE: "ab" * 32})
    assert keyless.wait(PATIENCE) == 2
    assert "a worker needs its driver's key" in keyless.stderr.read()
    assert alone.wait(PATIENCE) == 1
    said = alone.stderr.read()
    assert f"the driver at {endpoint} could not be reached within 0.5 s: connection refused" in said
    assert said.count("\n") == 1


def test_workers_end_with_a_lost_driver(connect, endpoint):
    script = f"""
import os, lockstep as ls
driver = ls.Driver(nprocs=0, remote=1, listen={endpoint!r}, timeout=60)
print(*driver.run(os.getpid), flush=True)
os.kill(os.getpid(), 9)
"""
    environment = {**os.environ, KEY_VARIABLE: "cd" * 32}
    worker = connect(env=environment)
    driver = warm.run([sys.executable, "-c", script], env=environment, text=True, timeout=60)
    assert driver.returncode == -signal.SIGKILL
    pid = int(driver.stdout.splitlines()[-1])
    assert worker.wait(PATIENCE) == 1
    said = worker.stderr.read()
    assert f"the driver at {endpoint} closed the connection, so its workers were ended" in said
    assert not psutil.pid_exists(pid)


def test_too_many_workers_are_refused(connect, endpoint, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "ef" * 32)
    many = connect("-n", "3")
    few = threading.Thread(target=lambda: (many.wait(PATIENCE), connect("-n", "1")))
    few.start()
    with ls.Driver(nprocs=0, remote=1, listen=endpoint, timeout=PATIENCE) as driver:
        few.join()
        assert many.returncode == 1
        assert "the driver waits for 1 more workers, not for 3" in many.stderr.read()
        assert driver.world_size == 1
