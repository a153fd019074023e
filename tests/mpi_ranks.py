"""Functions on ranks of MPI, which mpiexec starts and the tests' fork server forks.

A rank that mpiexec starts imports torch for two seconds. Here mpiexec starts stand-ins that import
nothing: each hands its connection with mpiexec to a rank that the fork server has forked, and ends
when that rank does. `tests/comm/mpi/test_implementations.py` runs the real ones.

    mpiexec ── PMI ──> stand-in r ── descriptor of PMI, variables ──> rank r, forked
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pytest_lockstep
from lockstep.bench import runners
from lockstep.launcher.environment import RankEnvironment

LAUNCHER_VARIABLES = RankEnvironment(1, "", 1, "", store=" ").variables(0).keys()
PATIENCE = 30.0  # seconds until mpiexec has started the stand-ins, and until it has ended

STAND_IN = """
import json, os, socket, sys
pmi = {name: value for name, value in os.environ.items() if name.startswith(("PMI", "MPI"))}
with socket.socket(socket.AF_UNIX) as listening:
    name = sys.argv[1] + "/" + pmi["PMI_RANK"]
    listening.bind(name + "-bound")
    listening.listen()
    os.rename(name + "-bound", name)
    rank, _ = listening.accept()
    socket.send_fds(rank, [json.dumps(pmi).encode()], [int(pmi["PMI_FD"])])
    rank.recv(1)
"""


def missing() -> str | None:
    """Return why there is no MPICH for the tests, or None."""
    for package in ("mpi4py", "mpich"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed"
    return None


needed = pytest.mark.skipif(missing() is not None, reason=str(missing()))
"""The mark of tests that need mpi4py and MPICH."""


def mpiexec() -> str:
    """Return MPICH's mpiexec, which is installed beside Python."""
    return runners.find_mpiexec()


@contextlib.contextmanager
def removing_segments() -> Iterator[None]:
    """Remove the shared memory that MPICH leaves when a rank calls MPI_Abort."""
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    yield
    left = set(Path("/dev/shm").glob("mpich_shm_*")) - before
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has exited
            mapped += maps.read_text()
    for segment in left:
        if segment.name not in mapped:  # not that of a test that runs at the same time
            segment.unlink(missing_ok=True)


def run(fn: Callable[..., Any], *args: Any, ranks: int, timeout: float = 100.0) -> list[Any]:
    """Call `fn(*args)` in ranks of MPI, and return their values in rank order."""
    with _stand_ins(ranks) as folder:
        given = folder, fn, args
        return pytest_lockstep.run(_call, *given, ranks=ranks, timeout=timeout, init=False)


@contextlib.contextmanager
def _stand_ins(ranks: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        command = [mpiexec(), "-n", str(ranks), sys.executable, "-S", "-E", "-c", STAND_IN, folder]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
            try:
                yield folder
                # Not its status: on a busy machine mpiexec may kill stand-ins that are about to
                # end. The ranks have ended already, with values.
                process.wait(PATIENCE)
            finally:
                if process.poll() is None:
                    process.terminate()


def _call(folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call the function as the rank of MPI that a stand-in was started for."""
    with _adopt(f"{folder}/{os.environ['RANK']}"):
        try:
            return fn(*args)
        finally:
            from mpi4py import MPI

            # A forked rank does not end its interpreter, in which mpi4py would do this.
            if MPI.Is_initialized() and not MPI.Is_finalized() and sys.exc_info()[0] is None:
                MPI.Finalize()


@contextlib.contextmanager
def _adopt(name: str) -> Iterator[None]:
    deadline = time.monotonic() + PATIENCE
    while not os.path.exists(name):
        assert time.monotonic() < deadline, "mpiexec did not start its ranks"
        time.sleep(0.01)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(name)
        text, (descriptor,), _, _ = socket.recv_fds(connection, 1 << 14, 1)
        for variable in LAUNCHER_VARIABLES & os.environ.keys():
            del os.environ[variable]
        os.environ.update(json.loads(text) | {"PMI_FD": str(descriptor)})
        yield
