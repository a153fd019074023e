"""Run a function on N ranks of this host, and get each rank's value back."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.errors import RankError, UsageError
from lockstep.run import preload
from lockstep.run.assignment import Assignment
from lockstep.run.channel import parcel
from lockstep.run.job import Job

__all__ = ["bind_loopback", "launch"]

START_METHODS = ("forkserver", "spawn", "fork")
BACKLOG = 1024  # every rank of a host may connect in the same instant


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    *,
    start_method: str = "forkserver",
    timeout: float | None = None,
    pass_rank: bool = False,
) -> list[Any]:
    """Run `fn(*args)` in `nprocs` processes and return their values in rank order.

    Functions of `__main__` or a notebook, closures and lambdas work: they travel
    by value. The ranks are forked from a process that has imported torch already,
    which is started by the first call and kept ("forkserver"); "spawn" gives each
    a fresh interpreter, "fork" a copy of this process. Inside, `lockstep.rank()`
    and the like are there at once, and `lockstep.init()` joins the ranks.
    `pass_rank=True` gives the rank as first argument, as programs written for
    `torch.multiprocessing.spawn` expect.

    Raises RankError for the first rank that fails, with its traceback as a note,
    or when `timeout` seconds passed; the other ranks are then ended.
    UsageError for a number of processes below 1.
    """
    _check(nprocs, start_method, timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    job = _start(fn, args, nprocs, start_method, pass_rank)
    try:
        error = job.watch(deadline)
    except TimeoutError:
        late = ", ".join(map(str, job.running))
        error = RankError(f"rank {late} had not returned after {timeout:g} s and was ended")
    finally:
        job.terminate()
    if error is not None:
        raise error
    return _values(job)


def _check(nprocs: int, start_method: str, timeout: float | None) -> None:
    if nprocs < 1:
        raise UsageError(f"launch(nprocs={nprocs}): a world has at least one rank")
    if start_method not in START_METHODS:
        raise UsageError(
            f"launch(start_method={start_method!r}): choose one of {', '.join(START_METHODS)}"
        )
    if timeout is not None and timeout <= 0:
        raise UsageError(f"launch(timeout={timeout}): a deadline is a positive number of seconds")


def _start(
    fn: Callable[..., Any], args: Sequence[Any], nprocs: int, start_method: str, pass_rank: bool
) -> Job:
    template = preload.fork() if start_method == "fork" else preload.template()
    own = template if start_method == "fork" else None
    job = Job(template.open_job(), nprocs, own)
    listening = bind_loopback()
    port = listening.getsockname()[1]
    assignment = Assignment(nprocs, "127.0.0.1", port, run=secrets.token_hex(4))
    job.start_store(listening.fileno(), port)
    listening.close()
    null = os.open(os.devnull, os.O_RDONLY)
    for rank in range(nprocs):
        given = (rank, *args) if pass_rank else tuple(args)
        work = parcel(pack(fn, given))
        task = {
            "task": "function",
            "fresh": start_method == "spawn",
            "flags": preload.interpreter_flags(),
            "environ": {"OMP_NUM_THREADS": "1", **os.environ, **assignment.variables(rank)},
            "cwd": os.getcwd(),
            "argv": sys.argv,
            "path": sys.path,
        }
        job.start_rank(rank, task, (null, 1, 2), work)
        os.close(work)
    os.close(null)
    return job


def pack(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickle a call; what another process could not import travels by value."""
    import cloudpickle  # type: ignore[import-untyped]

    packed: bytes = cloudpickle.dumps((fn, tuple(args)))
    return packed


def bind_loopback() -> socket.socket:
    """Return a socket that listens on a free port of the loopback interface only."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind(("127.0.0.1", 0))
    listening.listen(BACKLOG)
    return listening


def _values(job: Job) -> list[Any]:
    silent = [outcome.rank for outcome in job.outcomes if outcome.rank not in job.values]
    if silent:
        raise RankError(f"rank {silent[0]} exited with status 0 before its function returned")
    return [pickle.loads(job.values[outcome.rank]) for outcome in job.outcomes]
