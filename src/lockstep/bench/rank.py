"""A rank's side of the conversation: it waits for orders, asleep, until it is told to measure.

One JSON object a line over a Unix socket; the program that measures asks, every
rank of a peer answers.

    {"hello": rank, "library": "MPICH 5.0"}      a rank has come
    {"prepare": key, "order": {...}}             -> {} or {"cannot": reason}
    {"block": key, "calls": 50}                  -> {"times": [ns, ...], "wrong": 0}
    {"drop": key}                                -> {}
    {"bind": true}                               -> {}: rank r stays on one core, in turn
    end of file                                  the rank leaves
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from lockstep.bench.lineup import Lineup
from lockstep.bench.measure import CannotError, Library, Order, Task

__all__ = ["LINEUP", "SOCKET", "converse", "mpi_main", "serve", "torch_main"]

SOCKET, LINEUP = "socket", "lineup-"  # names in the folder where ranks and asker meet


def torch_main(backend: str, folder: str, peer: str, patience: float) -> None:
    """Join a world on `backend` and measure what is asked for."""
    import torch

    import lockstep
    from lockstep.bench.torch_calls import TorchLibrary

    lockstep.init(backend=backend, timeout=patience, device="cpu")
    named = f"torch {torch.__version__}"
    place = lockstep.world()
    serve(TorchLibrary(), place.rank, place.world_size, folder, peer, patience, named)
    lockstep.shutdown()


def mpi_main() -> None:
    """Measure as one of `mpiexec`'s ranks; the arguments are those of `serve`'s end."""
    folder, peer, patience = sys.argv[-3:]
    from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]

    from lockstep.bench.mpi_calls import MpiLibrary

    comm = MPI.COMM_WORLD
    named = " ".join(MPI.Get_library_version().split()[:3]).rstrip(",").replace("Version: ", "")
    library = MpiLibrary(MPI, comm)
    serve(library, comm.Get_rank(), comm.Get_size(), folder, peer, float(patience), named)


def serve(
    library: Library, rank: int, ranks: int, folder: str, peer: str, patience: float, named: str
) -> None:
    """Answer on the socket in `folder` until it is closed."""
    lineup = Lineup(f"{folder}/{LINEUP}{peer}", rank, ranks, patience)
    tasks: dict[str, Task] = {}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        return _answer(asked, library, rank, ranks, tasks, lineup)

    converse(answer, folder, {"hello": rank, "peer": peer, "library": named})
    tasks.clear()
    lineup.close()


def converse(
    answer: Callable[[dict[str, Any]], dict[str, Any]], folder: str, hello: dict[str, Any]
) -> None:
    """Say hello and answer what is asked on the socket in `folder`, until it is closed.

    An exception is an answer too: its sentence, as what cannot be done.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/{SOCKET}")
        with connection.makefile("rw", encoding="utf-8") as stream:
            _say(stream, hello)
            for line in stream:
                try:
                    said = answer(json.loads(line))
                except Exception as error:
                    said = {"cannot": _sentence(error)}
                _say(stream, said)


def _answer(
    asked: dict[str, Any],
    library: Library,
    rank: int,
    ranks: int,
    tasks: dict[str, Task],
    lineup: Lineup,
) -> dict[str, Any]:
    if "prepare" in asked:
        tasks[asked["prepare"]] = Task(library, Order(**asked["order"]), rank, ranks)
        return {}
    if "block" in asked:
        times, wrong = tasks[asked["block"]].block(asked["calls"], lineup)
        return {"times": times, "wrong": wrong}
    if "bind" in asked:
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[rank % len(allowed)]})
        return {}
    tasks.pop(asked["drop"], None)
    return {}


def _sentence(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0].strip()
    return text if isinstance(error, (CannotError, TimeoutError)) else (
        f"{type(error).__name__}: {text}"
    )  # fmt: skip


def _say(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
