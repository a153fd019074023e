"""A worker: a rank that runs the calls of the driver and of other workers.

    driver                              worker
      <── hello {port, pid} ──────────────│  the port for other workers
      ── join {rank, variables, peers} ──>│  lockstep.init()
      <── joined ─────────────────────────│
      ── call {number, keep, lends} ─────>│  function(*args) on its main thread
      <── value | kept | error {number} ──│
      ── lend, drop {object, token} ─────>│  references; on the receiving thread, at once
      ── gone {rank} ────────────────────>│  a worker that has exited holds nothing any more
      ── look ───────────────────────────>│  on the receiving thread, at once
      <── seen {waits} ───────────────────│  whether the main thread is in a collective
      ── leave ──────────────────────────>│  lockstep.shutdown(), to release the other workers
      ── end ────────────────────────────>│

Workers call each other over direct connections, which are opened by the first call: their data
does not pass through the driver. Both ends prove which worker they are, so that a call to one
worker is never answered by another one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any

from lockstep.kernel.errors import LockstepError, RankError
from lockstep.launcher.listening_socket import listen
from lockstep.launcher.rank_process import describe_error
from lockstep.launcher.run_secret import give_secret
from lockstep.launcher.world import init, shutdown
from lockstep.remote.calls import DRIVER, Calls, make_lost_outcome
from lockstep.remote.connection import Connection
from lockstep.remote.credentials import derive_store_secret
from lockstep.remote.future import SETTLE
from lockstep.remote.hang_recovery import is_in_collective
from lockstep.remote.objects import ObjectAddress, ObjectStore, TokenCounter
from lockstep.remote.task_queue import TaskQueue
from lockstep.transport.connection import connect
from lockstep.transport.credentials import Credentials, Identity, Role
from lockstep.transport.frame import Frame, FrameSocket
from lockstep.transport.listener import Listener

__all__ = ["run_worker"]

REMOTE = os.path.dirname(os.path.abspath(__file__))


def run_worker(address: str, port: int, credentials: Credentials, silence: float) -> None:
    """Serve the driver at `address`:`port` until it ends this worker, or is lost.

    Args:
        address: Name or address of the driver's host.
        port: The port at which the driver listens.
        credentials: The credentials of this worker.
        silence: Seconds of silence after which a connection counts as lost.

    Raises:
        RendezvousError: The driver does not answer.
        UsageError: The driver has another key.
    """
    worker = WorkerServer(address, port, credentials, silence)
    try:
        worker.serve()
    finally:
        worker.close()


class WorkerServer:
    """A worker's objects, its connections, and its calls to others."""

    def __init__(self, address: str, port: int, credentials: Credentials, silence: float) -> None:
        self._credentials, self._silence = credentials, silence
        self.rank = DRIVER
        self.queue, self.objects = TaskQueue(), ObjectStore()
        self._peers: list[tuple[str, int, Identity]] = []  # in rank order
        self._ranks: dict[Identity, int] = {}
        self._outgoing: dict[int, Connection] = {}
        self._gone: dict[int, str] = {}
        self._incoming: list[Connection] = []
        self._lock = threading.Lock()
        frames = connect(address, port, credentials, Identity(Role.DRIVER), silence, silence)
        own = frames.end.getsockname()[0]  # of the interface from which the driver is reached
        self._listener = Listener(listen(own, 0), credentials, silence, self._accept)
        self._driver = Connection(frames, self._on_driver_frame, self._on_driver_lost)

    def serve(self) -> None:
        """Run tasks until the driver ends this worker, or is lost."""
        hello = {"port": self._listener.port, "pid": os.getpid()}
        self._driver.start().post(Frame({"kind": "hello", **hello}))
        self.queue.run()

    def close(self) -> None:
        """Send the last answers and close all connections."""
        self._listener.close()
        for connection in [self._driver, *self._incoming, *self._outgoing.values()]:
            connection.close()

    # --- the transport of this worker's calls ---------------------------------------------

    def post(self, rank: int, frame: Frame) -> None:
        """Send a frame to another process; raise RankError if it has exited."""
        (self._driver if rank == DRIVER else self._connection_to(rank)).post(frame)

    def post_drop(self, address: ObjectAddress) -> None:
        """Notify a reference's owner; through the driver if there is no connection to the owner."""
        header = {"kind": "drop", "owner": address.owner, "object": address.number}
        connection = self._outgoing.get(address.owner) or self._driver
        connection.post(Frame({**header, "token": address.token}))

    def _connection_to(self, rank: int) -> Connection:
        with self._lock:
            if rank in self._gone:
                raise RankError(f"rank {rank} {self._gone[rank]}, so it cannot be called")
            if rank not in self._outgoing:
                address, port, called = self._peers[rank]
                try:
                    frames = connect(address, port, self._credentials, called, self._silence)
                except LockstepError as error:
                    raise RankError(f"rank {rank} cannot be called: {error}") from error
                on_frame = partial(self._on_frame, rank)
                on_lost = partial(self._on_peer_lost, rank)
                self._outgoing[rank] = Connection(frames, on_frame, on_lost).start()
            return self._outgoing[rank]

    # --- on the receiving threads -------------------------------------------------------

    def _accept(self, frames: FrameSocket, caller: Identity) -> None:
        on_frame = partial(self._on_worker_frame, caller)
        connection = Connection(frames, on_frame, lambda connection, reason: None)
        self._incoming.append(connection.start())

    def _on_driver_frame(self, connection: Connection, frame: Frame) -> None:
        header = frame.header
        match frame.kind:
            case "gone":
                self._lose(header["rank"], header["reason"])
            case "look":
                connection.post(Frame({"kind": "seen", "waits": is_in_collective()}))
            case "leave":
                self.queue.put(shutdown, from_driver=False)
            case "join":
                self.queue.put(partial(self._join, header), from_driver=True)
            case "end":
                self.queue.stop()
            case _:
                self._on_frame(DRIVER, connection, frame)

    def _on_worker_frame(self, caller: Identity, connection: Connection, frame: Frame) -> None:
        self._on_frame(self._ranks[caller], connection, frame)

    def _on_frame(self, rank: int, connection: Connection, frame: Frame) -> None:
        header = frame.header
        match frame.kind:
            case "call":
                for number, token in header["lends"]:
                    self.objects.lend(number, token, rank)
                task = partial(self._answer, rank, connection, frame)
                self.queue.put(task, from_driver=rank == DRIVER)
            case "value" | "kept" | "error":
                self.calls.on_answer(rank, frame)
                self.queue.wake()
            case "lend":
                self.objects.lend(header["object"], header["token"], header["holder"])
            case "drop":
                self._release([self.objects.drop(header["object"], header["token"])])

    def _release(self, things: list[Any]) -> None:
        """Have the main thread run the destructors of objects without holders."""
        if any(thing is not None for thing in things):
            self.queue.put(things.clear, from_driver=False)

    def _on_driver_lost(self, connection: Connection, reason: str) -> None:
        self.queue.stop()

    def _on_peer_lost(self, rank: int, connection: Connection, reason: str) -> None:
        # Wait for the driver, which reports how the process ended.
        self.queue.wait(lambda: rank in self._gone, time.monotonic() + SETTLE)
        self._lose(rank, reason)

    def _lose(self, rank: int, reason: str) -> None:
        with self._lock:
            self._gone.setdefault(rank, reason)
        self._release(self.objects.drop_holder(rank))
        self.calls.fail_calls(make_lost_outcome(rank, reason))
        self.queue.wake()

    # --- on the main thread ---------------------------------------------------------------

    def _join(self, header: dict[str, Any]) -> None:
        self.rank = header["rank"]
        self._peers = [
            (address, port, Identity(Role.WORKER, host, index))
            for address, port, host, index in header["peers"]
        ]
        self._ranks = {identity: rank for rank, (_, _, identity) in enumerate(self._peers)}
        self.calls = Calls(self.rank, self, self.queue.wait)
        self.calls.resolve = self._resolve
        self._tokens = TokenCounter(self.rank)
        give_secret(derive_store_secret(self._credentials.key))
        os.environ.update(header["variables"])
        answer: dict[str, Any] = {"kind": "joined"}
        try:
            init(**header["world"])
        except Exception as error:  # the driver waits for an answer, so report any error
            answer["report"] = describe_error(error)
        self._driver.post(Frame(answer))

    def _resolve(self, address: ObjectAddress) -> Any:
        """Return the object itself if it belongs to this worker, else a reference."""
        if address.owner != self.rank:
            return self.calls.reference(address)
        value = self.objects.value(address.number)
        self.objects.drop(address.number, address.token)
        return value

    def _answer(self, holder: int, connection: Connection, frame: Frame) -> None:
        number = frame.header["number"]
        try:
            function, args, options = self.calls.deserialize(frame.pieces)
            value = function(*args, **options)
            if frame.header["keep"]:
                answer = Frame({"kind": "kept", "address": self._keep(value, holder)})
            else:
                answer = Frame({"kind": "value"}, self.calls.serialize(holder, value))
        except BaseException as error:  # the caller waits for an answer, so report any error
            error.__traceback__ = _drop_remote_frames(error.__traceback__)
            answer = Frame(
                {"kind": "error", "report": describe_error(error)},
                self._serialize_error(holder, error),
            )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        answer.header["number"] = number
        connection.post(answer)

    def _keep(self, value: Any, holder: int) -> dict[str, Any]:
        token = self._tokens.new()
        number = self.objects.add(value, token, holder)
        return asdict(ObjectAddress(self.rank, number, token, type(value).__qualname__))

    def _serialize_error(self, holder: int, error: BaseException) -> Any:
        """Return the pieces of the exception itself; none if it cannot be pickled."""
        try:
            return self.calls.serialize(holder, error.with_traceback(None))
        except Exception:  # pickling may raise any exception; then only the report is sent
            return ()


def _drop_remote_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this package, which do not help the user."""
    kept = frames
    while kept is not None and kept.tb_frame.f_code.co_filename.startswith(REMOTE):
        kept = kept.tb_next
    return kept or frames
