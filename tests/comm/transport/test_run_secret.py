"""The secret of a run: where it is read, and who joins a run on two simulated hosts."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from lockstep.comm.transport import secret as run_secret
from lockstep.comm.transport.secret import SECRET, SECRET_FILE, make_secret, read_secret
from lockstep.kernel.errors import FileError, RendezvousError, UsageError
from lockstep.launcher import rendezvous
from lockstep.launcher.environment import RankInfo

TEXT = "5ec7e7" * 10 + "5ec7"
PATIENCE = 60.0

SCRIPT = """
import contextlib
import glob
import os
import socket
import sys
import torch
import torch.distributed as dist
import lockstep as ls

world = ls.init(timeout=float(sys.argv[1]))
total = torch.ones(1) * (world.rank + 1)
dist.all_reduce(total)
group = dist.new_group([0, world.world_size - 1])
print(f"rank {world.rank}: {int(total)}", flush=True)
if world.rank == 0:
    lines = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended since it was listed
            lines.append(open(path, "rb").read())
    print(f"{len(lines)} commands,", sum(b"5ec7e75ec7e7" in line for line in lines), "with secret")
dist.barrier()
lines = [line.split() for name in ("tcp", "tcp6", "udp", "udp6")
         for line in open(f"/proc/self/net/{name}").readlines()[1:]]
listening = {line[1].partition(":")[0] for line in lines if line[3] in ("0A", "07")}
print(f"rank {world.rank} listens:", *(socket.inet_ntoa(bytes.fromhex(address)[::-1])
      if len(address) == 8 else address for address in sorted(listening)), flush=True)
dist.barrier()
"""


def test_without_a_file_or_variable_there_is_no_secret():
    assert read_secret({}) is None
    assert make_secret(None, 0, {}) is None


def test_the_file_comes_before_the_variable(tmp_path):
    path = tmp_path / "run.secret"
    secret = make_secret(str(path), 0, {})
    assert read_secret({SECRET: TEXT}) == bytes.fromhex(TEXT)
    assert read_secret({SECRET: TEXT, SECRET_FILE: str(path)}) == secret
    assert make_secret(str(path), 1, {SECRET: TEXT}) == secret


def test_only_host_0_creates_the_file(tmp_path):
    path = tmp_path / "run.secret"
    with pytest.raises(UsageError, match="there is no such file here; host 0 creates it: copy it"):
        make_secret(str(path), 1, {})
    assert not path.exists()
    with pytest.raises(FileError, match="the secret of a run cannot be read"):
        read_secret({SECRET_FILE: str(path)})


def test_a_variable_without_a_secret():
    with pytest.raises(UsageError, match="LOCKSTEP_SECRET contains no secret of a run: 64 hexa"):
        read_secret({SECRET: "a password"})


def test_a_driver_gives_its_workers_the_secret(monkeypatch):
    monkeypatch.setattr(run_secret, "_given", [])
    run_secret.give_secret(b"g" * 32)
    assert read_secret({SECRET: TEXT}) == b"g" * 32


def test_a_launch_on_one_host_ignores_the_secret(tmp_path):
    """Also where it has no private store, as on macOS."""
    script = "import os, lockstep as ls\ndel os.environ['LOCKSTEP_STORE']\nls.init(timeout=20)\n"
    (tmp_path / "train.py").write_text(script)
    done = warm.run(
        [*warm.LOCKSTEP, "run", "-n", "2", "train.py"],
        cwd=tmp_path,
        env=os.environ | {SECRET: TEXT},
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


# --- two hosts ------------------------------------------------------------------------------


@pytest.fixture
def run(network, tmp_path) -> Iterator:
    """Run the script with two ranks on one host and one on the other; return what they print."""
    (tmp_path / "train.py").write_text(SCRIPT)
    net = network("a", "b")

    def run(
        options: tuple[list[str], list[str]],
        variables: tuple[dict[str, str], dict[str, str]] = ({}, {}),
        timeout: float = PATIENCE,
    ) -> list[tuple[int, str]]:
        def start(index: int) -> subprocess.Popen:
            command = [*warm.LOCKSTEP, "run", "--nnodes", "2", "--node-rank", str(index)]
            command += ["--master-addr", net.a.address, *options[index], "train.py", str(timeout)]
            return (net.a, net.b)[index].popen(
                command,
                start=warm.Popen,
                cwd=tmp_path,
                env=os.environ | variables[index],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

        with start(0) as first, start(1) as second:
            printed = [end.communicate(timeout=2 * PATIENCE)[0] for end in (first, second)]
        return [(end.returncode, text) for end, text in zip((first, second), printed, strict=True)]

    return run


def files_with(text: str, folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and text in path.read_text()]


def test_two_hosts_with_the_same_secret(run, tmp_path):
    variables = {SECRET: TEXT}
    (first, second), runs = run(([], []), (variables, variables)), tmp_path / "runs"
    assert first[0] == second[0] == 0, first[1] + second[1]
    assert "rank 0: 3" in first[1]
    assert "rank 1: 3" in second[1]
    assert "commands, 0 with secret" in first[1]
    assert "rank 0 listens: 10.77.0.1\n" in first[1]  # the store and Gloo, at no other address
    assert "rank 1 listens: 10.77.0.2\n" in second[1]
    assert "anyone" not in first[1] + second[1]
    assert TEXT not in first[1] + second[1]
    assert len(list(runs.rglob("launch.json"))) == 2
    assert not files_with(TEXT[:12], tmp_path / "runs")


def test_a_host_without_the_secret_does_not_join(run, tmp_path):
    first, second = run((["--secret-file", "run.secret"], []), timeout=6.0)
    assert (first[0], second[0]) == (1, 1)
    assert "requires a secret: copy the file that --secret-file names on its host" in second[1]
    # One line for each connection, or one for both if they arrived together.
    assert re.search(
        r"refused, the last one from 10\.77\.0\.2: |from 10\.77\.0\.2 was refused: ", first[1]
    )
    assert "Traceback" not in first[1] + second[1]
    assert (tmp_path / "run.secret").stat().st_mode & 0o777 == 0o600
    assert not files_with((tmp_path / "run.secret").read_text().strip(), tmp_path / "runs")


@pytest.mark.stress
def test_a_host_with_another_secret_does_not_join(run):
    _, second = run(([], []), ({SECRET: TEXT}, {SECRET: "ab" * 32}), timeout=10.0)
    assert second[0] == 1
    assert "has another secret than this host: give every host the same --secret-file" in second[1]


@pytest.mark.stress
def test_a_host_with_a_secret_does_not_join_a_run_without(run):
    first, second = run(([], []), ({}, {SECRET: TEXT}), timeout=10.0)
    assert second[0] == 1
    assert "has no secret, but this host has one" in second[1]
    assert "lockstep: anyone who can reach 10.77.0.1:29500 can join or disturb" in first[1]


def test_a_secret_is_refused_where_torchrun_serves_the_store(monkeypatch):
    monkeypatch.setenv(SECRET, TEXT)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    info = RankInfo(1, 2, 0, 1, 1, "127.0.0.1", 29511, launcher="torchrun")
    with pytest.raises(RendezvousError, match=r"torchrun at 127\.0\.0\.1:29511 admits"):
        rendezvous.wait_for_ranks(info, 10.0)
