"""Run a function on N ranks of this host, and get each rank's value back."""

from __future__ import annotations

import atexit
import os
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, overload

from lockstep.errors import RankError, UsageError
from lockstep.launcher import environment, preload
from lockstep.launcher.assignment import Assignment
from lockstep.launcher.channel import Message, parcel
from lockstep.launcher.job import Job
from lockstep.launcher.lingering import Lingering
from lockstep.launcher.verdict import spoken
from lockstep.messages import say

__all__ = ["Launched", "calling_in_place", "calls_in_place", "launch", "task"]

START_METHODS = ("forkserver", "spawn", "fork")
LOOPBACK = "127.0.0.1"

_calls_in_place = False


@contextmanager
def calling_in_place() -> Iterator[None]:
    """Let `launch` call its function in this process while the body runs.

    For a script that starts its own ranks, in a process that is one of its ranks already.
    """
    global _calls_in_place
    _calls_in_place = True
    try:
        yield
    finally:
        _calls_in_place = False


def calls_in_place() -> bool:
    """Whether `launch` calls its function in this process."""
    return _calls_in_place


class Launched:
    """The ranks of a launch that was not waited for (`join=False`).

    Failures are noticed, and the other ranks ended, while `join` waits.
    """

    def __init__(self, job: Job, timeout: float | None, daemon: bool) -> None:
        self._job = job
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._daemon = daemon
        self._launcher = os.getpid()
        atexit.register(self._at_exit)

    @property
    def processes(self) -> list[int]:
        """The ranks' process ids, in rank order."""
        while len(self._job.pids) < len(self._job.outcomes) and self._job.running:
            self._job.pump(0.1)
        return [self._job.pids[rank] for rank in self._job.outcomes]

    @property
    def exitcodes(self) -> list[int | None]:
        """Each rank's exit status, negative for a signal, None while it runs."""
        if self._job.running:
            self._job.pump(0)
        return [outcome.status for outcome in self._job.outcomes.values()]

    def join(self, timeout: float | None = None) -> list[Any]:
        """Wait for every rank and return their values in rank order.

        Raises RankError for the first rank that fails, after ending the others;
        TimeoutError after `timeout` seconds, with the ranks still running.
        """
        until = None if timeout is None else time.monotonic() + timeout
        limits = [limit for limit in (until, self._deadline) if limit is not None]
        try:
            error = self._job.watch(min(limits) if limits else None, Lingering(self._job).look)
        except TimeoutError:
            if self._deadline is None or time.monotonic() < self._deadline:
                late = spoken(self._job.running)
                raise TimeoutError(f"{late} did not return within {timeout:g} s") from None
            error = self._late()
        except BaseException:
            self.terminate()
            raise
        if not self._job.running:
            self.terminate()
        if error is not None:
            raise error
        return _values(self._job)

    def terminate(self) -> None:
        """End every rank: SIGTERM, after five seconds SIGKILL; grandchildren included."""
        atexit.unregister(self._at_exit)
        self._job.terminate()

    def _late(self) -> RankError:
        """End the ranks whose time is over; say who had not returned, and where they were."""
        running = self._job.running
        places = {rank: self._job.whereabouts(rank) for rank in running}
        told = ", ".join(f"rank {rank} was {place}" for rank, place in places.items() if place)
        error = RankError(
            f"{spoken(running)} had not returned after {self._timeout:g} s and "
            f"{'was' if len(running) == 1 else 'were'} ended" + (f" ({told})" if told else "")
        )
        error.rank = running[0]
        self.terminate()
        return error

    def _at_exit(self) -> None:
        """End the ranks at the end of the program, or wait for them if they are no daemons."""
        if self._launcher != os.getpid():
            return  # a forked child; the ranks are its parent's
        if self._daemon:
            self.terminate()
            return
        error = self._job.watch(self._deadline)
        if error is not None:
            say(str(error))


@overload
def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = ...,
    nprocs: int = ...,
    *,
    start_method: str = ...,
    join: Literal[True] = ...,
    daemon: bool = ...,
    timeout: float | None = ...,
    pass_rank: bool = ...,
) -> list[Any]: ...


@overload
def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = ...,
    nprocs: int = ...,
    *,
    start_method: str = ...,
    join: Literal[False],
    daemon: bool = ...,
    timeout: float | None = ...,
    pass_rank: bool = ...,
) -> Launched: ...


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    *,
    start_method: str = "forkserver",
    join: bool = True,
    daemon: bool = False,
    timeout: float | None = None,
    pass_rank: bool = False,
) -> list[Any] | Launched:
    """Run `fn(*args)` in `nprocs` processes and return their values in rank order.

    Functions of `__main__` or a notebook, closures and lambdas work: they travel
    by value. The ranks are forked from a process that has imported torch already,
    which is started by the first call and kept ("forkserver"); "spawn" gives each
    a fresh interpreter, "fork" a copy of this process. Inside, `lockstep.rank()`
    and the like are there at once, and `lockstep.init()` joins the ranks.
    `pass_rank=True` gives the rank as first argument, as programs written for
    `torch.multiprocessing.spawn` expect. Rank 0 reads this process's standard input.

    `join=False` returns a `Launched` at once; at the end of the program its ranks
    are waited for, or ended where `daemon` is true.

    Raises RankError for the first rank that fails, with its traceback as a note,
    or when `timeout` seconds passed; the other ranks are then ended.
    UsageError for a number of processes below 1, or a function that cannot travel.
    """
    _check(nprocs, start_method, timeout)
    if _calls_in_place:
        return _call_in_place(fn, args, join, pass_rank)
    launched = Launched(_start(fn, args, nprocs, start_method, pass_rank), timeout, daemon)
    return launched.join() if join else launched


def _check(nprocs: int, start_method: str, timeout: float | None) -> None:
    if nprocs < 1:
        raise UsageError(f"launch(nprocs={nprocs}): a world has at least one rank")
    if start_method not in START_METHODS:
        raise UsageError(
            f"launch(start_method={start_method!r}): choose one of {', '.join(START_METHODS)}"
        )
    if timeout is not None and timeout <= 0:
        raise UsageError(f"launch(timeout={timeout}): a deadline is a positive number of seconds")


def _call_in_place(
    fn: Callable[..., Any], args: Sequence[Any], join: bool, pass_rank: bool
) -> list[Any]:
    """Call the function as this process's rank; its value stands for that of every rank."""
    if not join:
        raise UsageError("lockstep check cannot run a script that calls launch(join=False)")
    place = environment.place(os.environ)
    value = fn(place.rank, *args) if pass_rank else fn(*args)
    return [value] * place.world_size


def _start(
    fn: Callable[..., Any], args: Sequence[Any], nprocs: int, start_method: str, pass_rank: bool
) -> Job:
    works = [_pack(fn, (rank, *args) if pass_rank else args) for rank in range(nprocs)]
    template = _template(start_method, works[0])
    own = template if start_method == "fork" else None
    job = Job(template.open_job(), range(nprocs), own)
    port = job.serve_store(LOOPBACK, 0)
    run, store = secrets.token_hex(4), job.create_store()
    assignment = Assignment(nprocs, LOOPBACK, port, run, store=store)
    for rank, packed in enumerate(works):
        work = parcel(packed)
        job.start(rank, task(assignment.variables(rank), start_method == "spawn"), work)
        os.close(work)
    return job


def _template(start_method: str, packed: bytes) -> preload.Preloaded:
    if start_method == "fork":
        return preload.fork()
    return preload.template(trains=preload.trains(packed))


def task(variables: Mapping[str, str], fresh: bool = False) -> Message:
    """Return the order for a rank that calls a function, with `variables` in its environment."""
    return {
        "task": "function",
        "fresh": fresh,
        "flags": preload.interpreter_flags(),
        "environ": {"OMP_NUM_THREADS": "1", **os.environ, **variables},
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "path": [os.fspath(place) for place in sys.path],
    }


def _pack(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]

    try:
        packed: bytes = cloudpickle.dumps((fn, tuple(args)))
    except (pickle.PicklingError, TypeError) as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise UsageError(
            f"launch({name}, ...) cannot send the function or its arguments to the ranks: {error}"
        ) from error
    return packed


def _values(job: Job) -> list[Any]:
    silent = [rank for rank in job.outcomes if rank not in job.values]
    if silent:
        error = RankError(f"{spoken(silent)} exited with status 0 before its function returned")
        error.rank, error.status = silent[0], 0
        raise error
    return [pickle.loads(job.values[rank]) for rank in job.outcomes]
