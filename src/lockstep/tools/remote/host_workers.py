"""The processes of the workers of one host, in a driver or in `lockstep worker --connect`.

Every worker connects to the driver itself, so `lockstep worker` only starts them and waits for
their ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lockstep.comm.transport.secret import KEY_VARIABLE
from lockstep.launcher.channel import write_memfd
from lockstep.launcher.failure_attribution import describe_end, make_rank_error
from lockstep.launcher.fork_server import get_fork_server
from lockstep.launcher.launch import function_task
from lockstep.launcher.output import RankOutput
from lockstep.launcher.pickling import dumps
from lockstep.launcher.rank_processes import TICK
from lockstep.launcher.supervisor import GRACE, RankSupervisor
from lockstep.tools.remote.output_forwarder import ForwardedStream, StreamName

__all__ = ["HostWorkers", "serve_driver"]


class HostWorkers:
    """Starts workers, reads their output and notices their ends.

    Args:
        count: Number of workers.
    """

    def __init__(self, count: int) -> None:
        server = get_fork_server()
        self.supervisor = RankSupervisor(server.open_launch(), range(count))
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self.supervisor.processes.readers.add(self._woken.fileno(), self._on_wake)
        self._reported: set[int] = set()

    def start(
        self,
        index: int,
        arguments: tuple[Any, ...],
        show: Callable[[StreamName, str], None] | None = None,
    ) -> None:
        """Start a worker with the arguments of `run_worker`, without the variable of the key.

        Args:
            index: The number of the worker on this host.
            arguments: The arguments.
            show: Called with each line that the worker prints, which begins with its number. None:
                the worker prints to this process's streams.
        """
        task = function_task({})
        task["environ"].pop(KEY_VARIABLE, None)
        output = None
        if show is not None:
            consoles: Any = [ForwardedStream(partial(show, name)) for name in ("stdout", "stderr")]
            output = RankOutput(index, None, tuple(consoles))
        work = write_memfd(dumps((call_run_worker, arguments)))
        self.supervisor.processes.start_rank(index, task, work, output, has_input=index == 0)
        os.close(work)

    def process_events(self, timeout: float = TICK) -> None:
        """Read output and notice ends, for at most `timeout` seconds or until `wake`."""
        self.supervisor.processes.process_events(timeout)

    def wake(self) -> None:
        """Let another thread return from `process_events`."""
        with contextlib.suppress(OSError):  # full of wake-ups already, or closed at the end
            self._wake.send(b"!")

    def new_ends(self) -> Iterator[tuple[int, str, int]]:
        """Yield the number, the way of the end and the exit status of each worker, once."""
        for index, outcome in self.supervisor.processes.outcomes.items():
            if outcome.status is not None and index not in self._reported:
                self._reported.add(index)
                yield index, describe_end(outcome), outcome.status

    def find_failure(self) -> str:
        """Return how a worker has failed or ended, with its number; empty if none has."""
        for index, outcome in self.supervisor.processes.outcomes.items():
            if outcome.status is not None or outcome.error is not None:
                return f"rank {index} {describe_end(outcome)}"
        return ""

    def close(self, *, waits: bool) -> None:
        """End the workers; `waits` gives them some seconds to exit by themselves first."""
        until = time.monotonic() + (GRACE if waits else 0.0)
        while self.supervisor.processes.running and time.monotonic() < until:
            self.process_events()
        self.supervisor.terminate()
        self._wake.close()
        self._woken.close()

    def _on_wake(self) -> bool:
        self._woken.recv(1 << 12)
        return True


def serve_driver(address: str, port: int, key: bytes, nprocs: int, timeout: float) -> None:
    """Serve a driver on another host with workers on this one, until it exits.

    Args:
        address: Name or address of the driver's host.
        port: The port at which the driver listens.
        key: The driver's key.
        nprocs: Number of workers.
        timeout: Seconds to wait for the driver, and seconds of silence after which the driver
            counts as lost.

    Raises:
        RankError: A worker failed: the driver did not answer, refused it or was lost.
    """
    workers = HostWorkers(nprocs)
    hello = {"kind": "hello", "host": secrets.token_hex(16), "workers": nprocs}
    try:
        for index in range(nprocs):
            workers.start(index, (address, port, key, timeout, {**hello, "index": index}))
        while workers.supervisor.processes.running:
            workers.process_events()
    finally:
        workers.close(waits=False)
    if error := make_rank_error(list(workers.supervisor.processes.outcomes.values())):
        raise error


def call_run_worker(*arguments: Any) -> None:
    """Call `run_worker`; imported only in the worker, because it needs torch."""
    from lockstep.tools.remote.worker import run_worker

    run_worker(*arguments)
