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

import threading
from functools import partial

from lockstep.kernel.errors import RendezvousError, UsageError
from lockstep.messages import log
from lockstep.tools.remote.connection import Connection, Message, connect_to_driver
from lockstep.tools.remote.host_workers import HostWorkers
from lockstep.tools.remote.output_forwarder import StreamName

__all__ = ["NodeAgent"]


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
        self._welcome: Message | None = None  # until the driver sends it
        self._refusal = self._lost = ""
        self._is_ended = False
        opened = connect_to_driver(address, port, key, timeout)
        self._workers = HostWorkers(nprocs)  # its fork server imports while the driver answers
        self._connection = Connection(opened, timeout, self._on_message, self._on_lost).start()

    def serve(self) -> None:
        """Serve until the driver exits.

        Raises:
            RendezvousError: The driver was lost.
            UsageError: The driver needs no more workers.
        """
        try:
            self._connection.post({"kind": "host", "workers": self._nprocs})
            with self._changed:
                self._changed.wait_for(lambda: self._welcome or self._is_over, self._timeout)
            if self._welcome:
                workers = "1 worker" if self._nprocs == 1 else f"{self._nprocs} workers"
                log(f"serving the driver at {self._driver} with {workers}")
                self._run_workers(self._welcome)
        finally:
            self._workers.close(waits=self._is_ended)
            self._connection.close()
        if self._refusal:
            raise UsageError(f"the driver at {self._driver} refused: {self._refusal}")
        if not self._is_ended:
            reason = self._lost or "did not answer"
            raise RendezvousError(
                f"the driver at {self._driver} {reason}, so its workers were ended"
            )

    def _run_workers(self, welcome: Message) -> None:
        for index in range(self._nprocs):
            hello = {**welcome, "kind": "hello", "index": index}
            arguments = (self._address, self._port, self._key, self._timeout, hello)
            self._workers.start(index, arguments, partial(self._forward, index), is_prefixed=False)
        while not self._is_over and self._workers.are_running:
            self._workers.process_events()
            for index, reason, status in self._workers.new_ends():
                ended = {"kind": "ended", "index": index, "reason": reason, "status": status}
                self._connection.post(ended)
        # Workers may notice the end of the driver before this process, or all have failed.
        # The connection reports a driver that is silent.
        with self._changed:
            self._changed.wait_for(lambda: self._is_over)

    def _forward(self, index: int, stream: StreamName, text: str) -> None:
        output = {"kind": "output", "index": index, "stream": stream}
        self._connection.post({**output, "payload": text.encode()})

    # --- on the connection's thread -------------------------------------------------------

    def _on_message(self, connection: Connection, message: Message) -> None:
        with self._changed:
            match message["kind"]:
                case "welcome":
                    self._welcome = message
                case "refused":
                    self._refusal = message["reason"]
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
