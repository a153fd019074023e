"""The node agent: starts and supervises the workers of one host for a driver on another.

`lockstep worker --connect` runs it.

driver                               this process                    workers
  <── host {workers} ──────────────────│
  ── welcome {host, session} ─────────>│ starts them ──────────────────> │
  <══ hello, calls, answers: each worker has its own connection ════════>│
  <── output {index, stream, text} ────│ <── what they print ────────────│
  <── ended {index, reason, status} ───│ <── how one ended ──────────────│
  ── end ─────────────────────────────>│ ends those that have not exited
"""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import Any

from lockstep.kernel.errors import RendezvousError, UsageError
from lockstep.launcher.channel import write_memfd
from lockstep.launcher.failure_attribution import describe_end
from lockstep.launcher.fork_server import get_fork_server
from lockstep.launcher.launch import function_task
from lockstep.launcher.output import RankOutput
from lockstep.launcher.pickling import dumps
from lockstep.launcher.supervisor import GRACE, TICK, RankSupervisor
from lockstep.messages import say
from lockstep.remote.connection import Connection
from lockstep.remote.credentials import KEY_SOURCE, KEY_VARIABLE
from lockstep.remote.output_forwarder import ForwardedStream
from lockstep.transport.connection import connect
from lockstep.transport.credentials import UNKNOWN_SESSION, Credentials, Identity, Role
from lockstep.transport.frame import Frame

__all__ = ["NodeAgent", "start_worker"]


class NodeAgent:
    """Serves the driver at `address`:`port` with `nprocs` workers on this host.

    Args:
        address: Name or address of the driver's host.
        port: The port at which the driver listens.
        key: The driver's key.
        nprocs: Number of workers.
        timeout: Seconds to wait for the driver, and seconds of silence after which the driver
            counts as lost.

    Raises:
        RendezvousError: The driver did not answer within the timeout.
        UsageError: The driver has another key.
    """

    def __init__(self, address: str, port: int, key: bytes, nprocs: int, timeout: float) -> None:
        self._address, self._port, self._key, self._timeout = address, port, key, timeout
        self._nprocs = nprocs
        self._changed = threading.Condition()
        self._host, self._session = 0, UNKNOWN_SESSION  # until the driver sends them
        self._refusal = self._lost = ""
        self._is_ended = False
        own = Credentials(key, Identity(Role.NODE_AGENT), source=KEY_SOURCE)
        frames = connect(address, port, own, Identity(Role.DRIVER), timeout, timeout)
        self._server = get_fork_server(for_training=True)  # imports while the driver answers
        self._connection = Connection(frames, self._on_frame, self._on_lost).start()

    def serve(self) -> None:
        """Serve until the driver exits.

        Raises:
            RendezvousError: The driver was lost.
            UsageError: The driver needs no more workers.
        """
        try:
            self._connection.post(Frame({"kind": "host", "workers": self._nprocs}))
            with self._changed:
                self._changed.wait_for(lambda: self._host or self._is_over, self._timeout)
            if self._host:
                workers = "1 worker" if self._nprocs == 1 else f"{self._nprocs} workers"
                say(f"serving the driver at {self._driver} with {workers}")
                self._run_workers()
        finally:
            self._connection.close()
        if self._refusal:
            raise UsageError(f"the driver at {self._driver} refused: {self._refusal}")
        if not self._is_ended:
            reason = self._lost or "did not answer"
            raise RendezvousError(
                f"the driver at {self._driver} {reason}, so its workers were ended"
            )

    def _run_workers(self) -> None:
        workers = RankSupervisor(self._server.open_launch(), range(self._nprocs))
        try:
            for index in range(self._nprocs):
                output = self._open_output(index)
                own = Identity(Role.WORKER, self._host, index)
                credentials = Credentials(self._key, own, self._session, KEY_SOURCE)
                arguments = (self._address, self._port, credentials, self._timeout)
                start_worker(workers, index, arguments, output)
            reported: set[int] = set()
            while not self._is_over and workers.running:
                workers.process_events(TICK)
                self._report_exits(workers, reported)
            # Workers may notice the end of the driver before this process, or all have failed.
            # The connection reports a driver that is silent.
            with self._changed:
                self._changed.wait_for(lambda: self._is_over)
            until = time.monotonic() + (GRACE if self._is_ended else 0)
            while workers.running and time.monotonic() < until:
                workers.process_events(TICK)
        finally:
            workers.terminate()

    def _open_output(self, index: int) -> RankOutput:
        stdout, stderr = (
            ForwardedStream(partial(self._forward, index, name)) for name in ("stdout", "stderr")
        )
        return RankOutput(index, None, (stdout, stderr), prefixed=False)  # type: ignore[arg-type]

    def _forward(self, index: int, stream: str, text: str) -> None:
        header = {"kind": "output", "index": index, "stream": stream, "text": text}
        self._connection.post(Frame(header))

    def _report_exits(self, workers: RankSupervisor, reported: set[int]) -> None:
        for index, outcome in workers.outcomes.items():
            if outcome.status is not None and index not in reported:
                reported.add(index)
                reason = {"reason": describe_end(outcome), "status": outcome.status}
                self._connection.post(Frame({"kind": "ended", "index": index, **reason}))

    # --- on the connection's thread -------------------------------------------------------

    def _on_frame(self, connection: Connection, frame: Frame) -> None:
        with self._changed:
            match frame.kind:
                case "welcome":
                    self._session = bytes.fromhex(frame.header["session"])
                    self._host = frame.header["host"]
                case "refused":
                    self._refusal = frame.header["reason"]
                case "end":
                    self._is_ended = True
            self._changed.notify_all()

    def _on_lost(self, connection: Connection, reason: str) -> None:
        with self._changed:
            self._lost = reason
            self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return bool(self._is_ended or self._lost or self._refusal)

    @property
    def _driver(self) -> str:
        return f"{self._address}:{self._port}"


def start_worker(
    workers: RankSupervisor,
    rank: int,
    arguments: tuple[str, int, Credentials, float],
    output: RankOutput,
) -> None:
    """Start a worker with the arguments of `run_worker`, and without the key's variable."""
    task = function_task({})
    task["environ"].pop(KEY_VARIABLE, None)
    work = write_memfd(dumps((call_run_worker, arguments)))
    workers.start_rank(rank, task, work, output, has_input=rank == 0)
    os.close(work)


def call_run_worker(*arguments: Any) -> None:
    """Call `run_worker`; imported only in the worker, because it needs torch."""
    from lockstep.remote.worker import run_worker

    run_worker(*arguments)
