"""`lockstep.launch`: run a function on N ranks of this host and return their values."""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from lockstep.call_checks import check_kinds, read_kinds
from lockstep.formatting import format_numbered
from lockstep.kernel.errors import RankError, UsageError
from lockstep.launcher.channel import Message, write_memfd
from lockstep.launcher.environment import DEFAULTS, OF_ELASTIC, RankEnvironment, read_rank_info
from lockstep.launcher.failure_codes import STOPPED
from lockstep.launcher.fork_server import (
    check_open_files,
    get_fork_server,
)
from lockstep.launcher.listening_socket import LOOPBACK
from lockstep.launcher.rank_process import get_launch_number, set_launch_number
from lockstep.launcher.rank_stores import choose_port
from lockstep.launcher.signals import receiving
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.launcher.target import check_working_directory
from lockstep.messages import log

__all__ = [
    "ProcessContext",
    "calls_in_this_process",
    "function_task",
    "launch",
    "launch_in_this_process",
    "start",
]

T = TypeVar("T")

_calls_in_this_process = False
_launches = itertools.count()


@contextmanager
def launch_in_this_process() -> Iterator[None]:
    """Make `launch` call its function in this process while the body runs.

    `lockstep check` and `lockstep replay` use it for scripts that call `launch`: they run the
    script in a process that already is one of its ranks.
    """
    global _calls_in_this_process, _launches
    _calls_in_this_process = True
    _launches = itertools.count()
    set_launch_number(None)
    try:
        yield
    finally:
        _calls_in_this_process = False


def calls_in_this_process() -> bool:
    """Return whether `launch` calls its function in this process."""
    return _calls_in_this_process


class ProcessContext:
    """The processes of a launch that has been started; they end with the program at the latest.

    Failures are detected, and the other ranks ended, only while `join` waits.
    """

    def __init__(self, ranks: RankSupervisor, timeout: float | None) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._launcher = os.getpid()
        atexit.register(self._at_exit)

    @property
    def processes(self) -> list[int]:
        """The ranks' process ids, in rank order."""
        while (
            len(self._ranks.processes.pids) < len(self._ranks.processes.outcomes)
            and self._ranks.processes.running
        ):
            self._ranks.processes.process_events(0.1)
        return [self._ranks.processes.pids[rank] for rank in self._ranks.processes.outcomes]

    @property
    def exitcodes(self) -> list[int | None]:
        """Each rank's exit status, negative for a signal, None while it runs."""
        if self._ranks.processes.running:
            self._ranks.processes.process_events(0)
        return [outcome.status for outcome in self._ranks.processes.outcomes.values()]

    def join(self, timeout: float | None = None) -> list[Any]:
        """Wait for every rank and return their values in rank order.

        If the program has no handler for SIGTERM and this is its main thread, SIGTERM is passed
        on to the ranks. They have 28 s to save a checkpoint and exit with status 75; otherwise
        the ranks are ended, and then SIGTERM ends the program.

        Args:
            timeout: Seconds to wait; None waits without limit.

        Raises:
            RankError: A rank failed (the first one is named), and the others were ended; or
                the launch's own timeout expired.
            SystemExit: The ranks stopped on request; the status is 75.
            TimeoutError: `timeout` expired; the ranks are still running.
        """
        until = None if timeout is None else time.monotonic() + timeout
        limits = [limit for limit in (until, self._deadline) if limit is not None]
        try:
            error = self._wait(min(limits) if limits else None)
        except TimeoutError:
            if self._deadline is None or time.monotonic() < self._deadline:
                late = format_numbered("rank", self._ranks.processes.running)
                raise TimeoutError(f"{late} did not return within {timeout:g} s") from None
            error = self._end_late_ranks()
        except BaseException:
            self.terminate()
            raise
        if not self._ranks.processes.running:
            self.terminate()
        if error is not None:
            raise error
        return _values(self._ranks)

    def _wait(self, deadline: float | None) -> RankError | None:
        """Wait for the ranks as `RankSupervisor.wait` does; obey SIGTERM."""
        with _catch_sigterm() as requests:
            try:
                error = self._ranks.wait(
                    is_stop_requested=lambda: bool(requests), deadline=deadline
                )
            except BaseException:
                if requests:  # a second SIGTERM
                    self._ranks.terminate(grace=0.0)
                raise
            if error is None and self._ranks.has_stopped and STOPPED in self.exitcodes:
                requests.clear()
                self.terminate()
                log("stopped on request")
                raise SystemExit(STOPPED)
            if requests and error is not None:
                log(str(error))
        return error

    def terminate(self) -> None:
        """End every rank and what it started: SIGTERM, and after 5 s or Ctrl-C SIGKILL."""
        atexit.unregister(self._at_exit)
        try:
            self._ranks.terminate()
        except KeyboardInterrupt:  # raised in the main thread only, which may set handlers
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._ranks.terminate(grace=0.0)
            signal.signal(signal.SIGINT, before)

    def _end_late_ranks(self) -> RankError:
        """End the ranks after the timeout; return an error that says where they were."""
        running = self._ranks.processes.running
        call_sites = {rank: self._ranks.processes.probes.locate(rank) for rank in running}
        where = ", ".join(
            f"rank {rank} was {call_site}" for rank, call_site in call_sites.items() if call_site
        )
        error = RankError(
            f"{format_numbered('rank', running)} had not returned after {self._timeout:g} s and "
            f"{'was' if len(running) == 1 else 'were'} ended" + (f" ({where})" if where else "")
        )
        error.rank = running[0]
        self.terminate()
        return error

    def _at_exit(self) -> None:
        if self._launcher == os.getpid():  # not in a forked child: the ranks belong to its parent
            self.terminate()


class _Terminated(BaseException):
    """SIGTERM was received a second time."""


@contextmanager
def _catch_sigterm() -> Iterator[list[int]]:
    """Collect SIGTERM in the list that this yields; a second one raises.

    After the body SIGTERM ends the program if there was one, unless the list has been cleared.
    Does nothing outside the main thread, or if the program has its own handler.
    """
    requests: list[int] = []

    def collect(number: int) -> None:
        requests.append(number)
        if len(requests) == 2:
            raise _Terminated

    try:
        with receiving([signal.SIGTERM], collect):
            yield requests
    finally:
        if requests:
            os.kill(os.getpid(), signal.SIGTERM)
            # Only process 1 of a container survives that.
            raise SystemExit(128 + signal.SIGTERM)


def launch(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    *,
    timeout: float | None = None,
    pass_rank: bool = False,
) -> list[T]:
    """Run `fn(*args)` in `nprocs` processes and return their values in rank order.

    Functions of `__main__` or a notebook, closures and lambdas are sent by value. In the function,
    `lockstep.rank()` and `lockstep.world_size()` work at once, and `lockstep.init()` joins the
    world. Rank 0 inherits this process's standard input.

    Args:
        fn: The function. Arguments and results are pickled.
        args: Its arguments.
        nprocs: The number of ranks, at least 1.
        timeout: The seconds after which ranks that have not returned are ended. None: no limit.
        pass_rank: Whether to pass the rank as first argument, as `torch.multiprocessing.spawn`
            does.

    Raises:
        RankError: A rank failed (the first one is named, with its traceback as a note), or
            the timeout expired; the other ranks were ended.
        SystemExit: The ranks stopped on request (`ProcessContext.join`); the status is 75.
        UsageError: An argument is not valid, the function cannot be pickled, or this process may
            not open enough files.
    """
    if _calls_in_this_process:
        _check(fn, args, nprocs, timeout, pass_rank)
        return _call_in_this_process(fn, args, pass_rank)
    return start(fn, args, nprocs, timeout=timeout, pass_rank=pass_rank).join()


def start(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    *,
    timeout: float | None = None,
    pass_rank: bool = False,
) -> ProcessContext:
    """Start the ranks of `launch`, with the same arguments, and do not wait for them."""
    _check(fn, args, nprocs, timeout, pass_rank)
    pickled = _pickle(fn, args)
    server = get_fork_server()
    ranks = RankSupervisor(server.open_launch(), range(nprocs))
    port = choose_port(LOOPBACK)
    store = ranks.processes.stores.create()
    environment = RankEnvironment(nprocs, LOOPBACK, port, secrets.token_hex(4), store=store)
    number = next(_launches)
    work = write_memfd(pickled)
    for rank in range(nprocs):
        task = function_task(environment.variables(rank))
        task |= {"launch": number, "pass_rank": pass_rank}
        ranks.processes.start_rank(rank, task, work, has_input=rank == 0)
    os.close(work)
    return ProcessContext(ranks, timeout)


def _check(fn: object, args: object, nprocs: int, timeout: float | None, pass_rank: bool) -> None:
    if not callable(fn):
        right = ""
        if callable(args) and isinstance(fn, int):
            right = f": the function comes first, as in launch({_name(args)}, nprocs={fn})"
        raise UsageError(f"launch({fn!r}, ...) expects a function, not {type(fn).__name__}{right}")
    check_working_directory()
    if not isinstance(args, Sequence):
        raise UsageError(
            f"launch({_name(fn)}, {args!r}): expected the arguments as a tuple, such as "
            f"launch({_name(fn)}, (1, 2), nprocs=2)"
        )
    numbers = {"nprocs": nprocs, "timeout": timeout, "pass_rank": pass_rank}
    check_kinds("launch", read_kinds(_check.__annotations__), numbers)
    if nprocs < 1:
        raise UsageError(f"launch(nprocs={nprocs}): at least one rank is needed")
    if timeout is not None and timeout <= 0:
        raise UsageError(f"launch(timeout={timeout}): expected a positive number of seconds")
    check_open_files(nprocs)


def _name(fn: object) -> str:
    return str(getattr(fn, "__qualname__", repr(fn)))


def _call_in_this_process(
    fn: Callable[..., Any], args: Sequence[Any], pass_rank: bool
) -> list[Any]:
    """Call the function in this process, and return its value once per rank."""
    rank_info = read_rank_info(os.environ)
    before = get_launch_number()
    set_launch_number(next(_launches))
    try:
        value = fn(rank_info.rank, *args) if pass_rank else fn(*args)
    finally:
        set_launch_number(before)
    return [value] * rank_info.world_size


def function_task(variables: Mapping[str, str]) -> Message:
    """Return the message that starts a rank which calls a function.

    Args:
        variables: Variables to add to its environment.
    """
    # Ranks that a member of an elastic run launches are not members themselves.
    inherited = {name: value for name, value in os.environ.items() if name not in OF_ELASTIC}
    return {
        "task": "function",
        "environ": {**DEFAULTS, **inherited, **variables},
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "path": [os.fspath(entry) for entry in sys.path],
    }


def _pickle(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    from lockstep.launcher.pickling import dumps  # needed here only

    try:
        pickled = dumps((fn, tuple(args)))
    except (pickle.PickleError, TypeError) as error:  # torch raises the base class, too
        raise UsageError(
            f"launch({_name(fn)}, ...) cannot send the function or its arguments to the ranks: "
            f"{error}"
        ) from error
    return pickled


def _values(ranks: RankSupervisor) -> list[Any]:
    silent = [rank for rank in ranks.processes.outcomes if rank not in ranks.processes.values]
    if silent:
        error = RankError(
            f"{format_numbered('rank', silent)} exited with status 0 before its function returned"
        )
        error.rank = silent[0]
        error.status = 0
        raise error
    return [pickle.loads(ranks.processes.values[rank]) for rank in ranks.processes.outcomes]
