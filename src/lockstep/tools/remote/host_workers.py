"""The processes of the workers of one host, in a driver or a node agent."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lockstep.comm.transport.secret import KEY_VARIABLE
from lockstep.launcher.channel import write_memfd
from lockstep.launcher.failure_attribution import describe_end
from lockstep.launcher.fork_server import get_fork_server
from lockstep.launcher.launch import function_task
from lockstep.launcher.output import RankOutput
from lockstep.launcher.pickling import dumps
from lockstep.launcher.supervisor import GRACE, TICK, RankSupervisor
from lockstep.tools.remote.output_forwarder import ForwardedStream, StreamName

__all__ = ["HostWorkers"]


class HostWorkers:
    """Starts workers, reads their output and notices their ends.

    Args:
        count: Number of workers.
    """

    def __init__(self, count: int) -> None:
        server = get_fork_server(for_training=True)
        self.supervisor = RankSupervisor(server.open_launch(), range(count))
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self.supervisor.readers.add(self._woken.fileno(), self._on_wake)
        self._reported: set[int] = set()

    def start(
        self,
        index: int,
        arguments: tuple[Any, ...],
        show: Callable[[StreamName, str], None],
        *,
        is_prefixed: bool,
    ) -> None:
        """Start a worker with the arguments of `run_worker`, without the variable of the key.

        Args:
            index: The number of the worker on this host.
            arguments: The arguments.
            show: Called with what the worker prints.
            is_prefixed: Whether to begin each line with the number of the worker.
        """
        task = function_task({})
        task["environ"].pop(KEY_VARIABLE, None)
        streams: Any = tuple(ForwardedStream(partial(show, name)) for name in ("stdout", "stderr"))
        output = RankOutput(index, None, streams, prefixed=is_prefixed)
        work = write_memfd(dumps((call_run_worker, arguments)))
        self.supervisor.start_rank(index, task, work, output, has_input=index == 0)
        os.close(work)

    def process_events(self, timeout: float = TICK) -> None:
        """Read output and notice ends, for at most `timeout` seconds or until `wake`."""
        self.supervisor.process_events(timeout)

    def wake(self) -> None:
        """Let another thread return from `process_events`."""
        with contextlib.suppress(OSError):  # full of wake-ups already, or closed at the end
            self._wake.send(b"!")

    @property
    def are_running(self) -> bool:
        """Whether a worker runs."""
        return bool(self.supervisor.running)

    def new_ends(self) -> Iterator[tuple[int, str, int]]:
        """Yield the number, the way of the end and the exit status of each worker, once."""
        for index, outcome in self.supervisor.outcomes.items():
            if outcome.status is not None and index not in self._reported:
                self._reported.add(index)
                yield index, describe_end(outcome), outcome.status

    def find_failure(self) -> str:
        """Return how a worker has failed or ended, with its number; empty if none has."""
        for index, outcome in self.supervisor.outcomes.items():
            if outcome.status is not None or outcome.error is not None:
                return f"rank {index} {describe_end(outcome)}"
        return ""

    def close(self, *, waits: bool) -> None:
        """End the workers; `waits` gives them some seconds to exit by themselves first."""
        until = time.monotonic() + (GRACE if waits else 0.0)
        while self.are_running and time.monotonic() < until:
            self.process_events()
        self.supervisor.terminate()
        self._wake.close()
        self._woken.close()

    def _on_wake(self) -> bool:
        self._woken.recv(1 << 12)
        return True


def call_run_worker(*arguments: Any) -> None:
    """Call `run_worker`; imported only in the worker, because it needs torch."""
    from lockstep.tools.remote.worker import run_worker

    run_worker(*arguments)
