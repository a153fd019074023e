"""The worker process of a rank: it sleeps until the benchmark asks it to measure.

The benchmark sends requests over a Unix socket, one JSON object per line, and every rank
answers.

    {"hello": rank, "library": "MPICH 5.0"}      the rank has connected
    {"prepare": key, "workload": {...}}          -> {} or {"error": reason}
    {"block": key, "calls": 50}                  -> {"times": [ns, ...], "wrong": 0}
    {"drop": key}                                -> {}
    {"bind": true}                               -> {}: bind rank r to one core, round-robin
    end of file                                  the rank exits
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from lockstep.tools.bench.workload import (
    Library,
    PreparedWorkload,
    StartBarrier,
    UnsupportedError,
    Workload,
)

__all__ = [
    "SOCKET",
    "START_BARRIER",
    "answer_requests",
    "mpi_main",
    "run_worker",
    "torch_main",
]

SOCKET, START_BARRIER = "socket", "start-barrier-"  # file names in the folder of the rendezvous


def torch_main(backend: str, folder: str, key: str, timeout: float) -> None:
    """Run a rank of `torch.distributed` on `backend`."""
    import torch

    from lockstep.launcher.world import init, shutdown
    from lockstep.tools.bench.torch_library import TorchLibrary

    world = init(backend=backend, timeout=timeout, device="cpu")
    named = f"torch {torch.__version__}"
    run_worker(TorchLibrary(), world.rank, world.world_size, folder, key, timeout, named)
    shutdown()


def mpi_main() -> None:
    """Run a rank of `mpiexec`; ranks, folder, key and timeout are on the command line."""
    ranks, folder, key, timeout = sys.argv[-4:]
    from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]

    from lockstep.tools.bench.mpi_library import MpiLibrary, name_library

    comm, named = MPI.COMM_WORLD, name_library(MPI)
    if comm.Get_size() != int(ranks):
        sys.exit(
            f"each of the {ranks} ranks is alone in {named}, the MPI of mpi4py: put the mpiexec of "
            "that MPI first on PATH"
        )
    library = MpiLibrary(MPI, comm)
    run_worker(library, comm.Get_rank(), comm.Get_size(), folder, key, float(timeout), named)


def run_worker(
    library: Library, rank: int, ranks: int, folder: str, key: str, timeout: float, named: str
) -> None:
    """Answer requests on the socket in `folder` until it is closed."""
    start_barrier = StartBarrier(f"{folder}/{START_BARRIER}{key}", rank, ranks, timeout)
    tasks: dict[str, PreparedWorkload] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return _answer(request, library, rank, ranks, tasks, start_barrier)

    answer_requests(answer, folder, {"hello": rank, "runner": key, "library": named})
    tasks.clear()
    start_barrier.close()


def answer_requests(
    answer: Callable[[dict[str, Any]], dict[str, Any]], folder: str, hello: dict[str, Any]
) -> None:
    """Send `hello` and answer requests on the socket in `folder` until it is closed.

    An exception is answered with {"error": its message}.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/{SOCKET}")
        with connection.makefile("rw", encoding="utf-8") as stream:
            _send(stream, hello)
            for line in stream:
                try:
                    reply = answer(json.loads(line))
                except Exception as error:
                    reply = {"error": _describe(error)}
                _send(stream, reply)


def _answer(
    request: dict[str, Any],
    library: Library,
    rank: int,
    ranks: int,
    tasks: dict[str, PreparedWorkload],
    start_barrier: StartBarrier,
) -> dict[str, Any]:
    if "prepare" in request:
        tasks[request["prepare"]] = PreparedWorkload(
            library, Workload(**request["workload"]), rank, ranks
        )
        return {}
    if "block" in request:
        times, wrong = tasks[request["block"]].time_block(request["calls"], start_barrier.wait)
        return {"times": times, "wrong": wrong}
    if "bind" in request:
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[rank % len(allowed)]})
        return {}
    tasks.pop(request["drop"], None)
    return {}


def _describe(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0].strip()
    return text if isinstance(error, (UnsupportedError, TimeoutError)) else (
        f"{type(error).__name__}: {text}"
    )  # fmt: skip


def _send(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
