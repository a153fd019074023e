"""The worker pool: a driver's workers, from their start to their end.

    waiting for workers ──all connected──> joining ──all joined──> at work ──> ended
            │ timeout, or a worker exited     │ a worker could not
            └───────────── ended, with the error that says why ─────────────────^

Threads: two for each connection, and one that watches the processes of this host and reads their
output. It processes an answer after the output that was printed before the answer. All threads
are daemons, and none holds a reference to the driver. So a driver without other references is
garbage-collected, and its workers end with it.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.comm.transport.listener import MessageListener
from lockstep.comm.transport.message_connection import MessageConnection
from lockstep.kernel.errors import LockstepError, RankError, RendezvousError, UsageError
from lockstep.launcher.listening_socket import listen
from lockstep.launcher.rank_stores import choose_port
from lockstep.tools.remote.calls import SETTLE, Calls, Future, await_results, make_lost_outcome
from lockstep.tools.remote.connection import MAX_PAYLOAD, PURPOSE, Connection, RemoteMessage
from lockstep.tools.remote.hang_recovery import HangRecovery
from lockstep.tools.remote.host_workers import HostWorkers
from lockstep.tools.remote.output_forwarder import OutputForwarder, has_display
from lockstep.tools.remote.roster import Roster, WorkerHandle

__all__ = ["WorkerPool"]


# It has many attributes: it joins the workers' processes, connections, calls and output.
class WorkerPool:
    """The workers of one driver.

    Args:
        nprocs: Number of workers on this host.
        remote: Number of workers that connect from other hosts.
        address: The address at which the driver listens.
        port: The port at which the driver listens; 0 for a free port.
        key: The driver's key.
        silence: Seconds of silence after which a worker counts as lost.
        world: Arguments of `lockstep.init` on every worker.
    """

    def __init__(
        self,
        nprocs: int,
        remote: int,
        address: str,
        port: int,
        key: bytes,
        silence: float,
        world: dict[str, Any],
    ) -> None:
        self.size = nprocs + remote
        self.remote = remote
        self.output = OutputForwarder()
        self.recovery = HangRecovery()
        self.calls = Calls(self.post, self.output.wait, self.recovery.watch)
        self.workers: list[WorkerHandle] = []  # in rank order, once all have connected
        self._roster = Roster(nprocs, remote)
        self._silence = silence
        self._answers: deque[tuple[int, RemoteMessage]] = deque()
        self._owner = os.getpid()
        self._is_closing = False
        listening = _listen(address, port)
        self._local = HostWorkers(nprocs)  # first, as its fork server takes longest to start
        self._listener = MessageListener(
            listening, key, PURPOSE, self._print_refusal, self._accept, MAX_PAYLOAD
        )
        self.address = address, self._listener.port
        processes = self._local.supervisor.processes
        processes.show_progress = self.output.show_progress
        store_port = processes.stores.serve(address, 0) if remote else choose_port(address)
        store = "" if remote else processes.stores.create()
        self._world = {"world": world, "store": store, "store_port": store_port}
        for index in range(nprocs):
            hello = {"kind": "hello", "host": self._roster.hosts[0], "index": index}
            arguments = (*self.address, key, silence, {**hello, "workers": nprocs})
            self._local.start(index, arguments, self.output.put)
        self._thread = threading.Thread(target=self._watch, name="lockstep driver", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # LIFO: runs before the fork server is closed

    # --- starting -------------------------------------------------------------------------

    def wait_for_workers(self, deadline: float) -> None:
        """Wait until every worker has connected and joined the world.

        Raises:
            RendezvousError: The deadline passed.
            RankError: A worker exited before.
        """
        connected = self._roster.workers
        self._wait(lambda: len(connected) == self.size, deadline, "connected")
        self.workers = self._roster.assign_ranks()
        environment = {
            "master_addr": self.address[0],
            "master_port": self._world["store_port"],
            "run_id": secrets.token_hex(4),
            "store": self._world["store"],
            "is_served": self.remote > 0,
        }
        for worker in self.workers:
            variables = worker.variables(self.workers, **environment)
            join = {"kind": "join", "variables": variables, "world": self._world["world"]}
            worker.connection.post(join)
        self._wait(lambda: all(worker.has_joined for worker in self.workers), deadline, "joined")

    def _wait(self, done: Callable[[], bool], deadline: float, what: str) -> None:
        self.output.wait(lambda: done() or bool(self._startup_error()), deadline)
        if error := self._startup_error():
            raise error
        if not done():
            joined = sum(worker.has_joined for worker in self.workers)
            count = len(self._roster.workers) if what == "connected" else joined
            address, port = self.address
            raise RendezvousError(
                f"{count} of {self.size} workers {what} in time: check that `lockstep worker "
                f"--connect {address}:{port}` was started on every other host"
            )

    def _startup_error(self) -> Exception | None:
        """Return why a worker cannot join: its own error, or how it ended."""
        for worker in list(self._roster.workers.values()):
            if worker.error is not None:
                return RankError(worker.error["message"])
            if worker.lost:
                return RankError(f"rank {worker.rank} {worker.lost} before it had joined")
        failure = self._local.find_failure()
        return RankError(f"{failure} before it had joined") if failure else None

    @property
    def has_display(self) -> bool:
        """Whether the live display of rank 0 can be drawn here."""
        return self.remote < self.size and has_display()

    # --- calls ------------------------------------------------------------------------------

    def call_all(self, what: str, function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        """Call a function on all workers and return the values in rank order."""
        return self.gather_values(self.calls.start(range(self.size), what, function, args))

    def gather_values(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Return the values of a call on all workers; raise the error that is the cause."""
        try:
            return await_results(futures, self.output.wait)
        except LockstepError as error:
            self.recovery.explain(error, futures)
            raise

    def require_world(self) -> None:
        """Wait until hang recovery is done; raise RankError if the world has ended."""

        def is_decided() -> bool:
            is_lost = any(worker.lost for worker in self.workers)
            return is_lost or self.recovery.is_decided or self._is_closing

        self.output.wait(is_decided, None)
        if self.recovery.world_error:
            raise RankError(self.recovery.world_error)

    def post(self, rank: int, message: RemoteMessage) -> None:
        """Send a message to a worker; raise RankError if the worker is lost."""
        worker = self.find_worker(rank)
        if worker.lost:
            error = RankError(f"rank {rank} {worker.lost}, so it cannot be called")
            self.recovery.explain(error)
            raise error
        worker.connection.post(message)

    def post_to_all(self, message: RemoteMessage) -> None:
        """Send a message to all workers that are left; called by finalizers, so it never waits."""
        if not self._is_closing and os.getpid() == self._owner:
            for worker in self.workers:
                worker.connection.post(message)

    def find_worker(self, rank: int) -> WorkerHandle:
        """Return a worker by its rank; raise UsageError if there is no such worker."""
        if self._is_closing:
            raise UsageError("the driver is closed: its workers have ended")
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank}: the driver has ranks 0 to {self.size - 1}")
        return self.workers[rank]

    # --- on the connections' threads --------------------------------------------------

    def _accept(self, opened: MessageConnection) -> None:
        connection = Connection(opened, self._silence, self._on_message, self._on_lost)
        self._roster.connections.append(connection)
        connection.start()

    def _print_refusal(self, line: str) -> None:
        self.output.put("stderr", f"lockstep: {line}\n")
        self._local.wake()

    def _on_message(self, connection: Connection, message: RemoteMessage) -> None:
        if message["kind"] == "hello":
            if reason := self._roster.add_worker(connection, message):
                # Before the answer: the driver may end as soon as its worker has it.
                self._print_refusal(f"a connection from {connection.peer} was refused: {reason}")
                connection.post({"kind": "refused", "reason": reason})
            self.output.wake()
            return
        worker = self._roster.workers[connection]
        match message["kind"]:
            case "value" | "error":
                self._answers.append((worker.rank, message))
                self._local.wake()
            case "joined":
                worker.error = message.get("report")
                worker.has_joined = worker.error is None
                self.output.wake()

    def _on_lost(self, connection: Connection, reason: str) -> None:
        if connection in self._roster.workers:
            self._roster.workers[connection].connection_lost = reason
            self._local.wake()

    # --- on the driver's own thread -------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_closing:
            self._local.process_events()
            self._read_output()
            while self._answers:
                self.calls.on_answer(*self._answers.popleft())
            self._notice_ends()
            self.recovery.proceed(self.workers)
            self.output.wake()
            self.output.show_if_no_caller_waits()
        self._finish()

    def _read_output(self) -> None:
        """Read all output that was printed before the answers that have arrived."""
        before = -1
        while self._answers and before != self.output.received:
            before = self.output.received
            self._local.process_events(0)

    def _notice_ends(self) -> None:
        workers = list(self._roster.workers.values())
        for index, reason, status in self._local.new_ends():
            for worker in workers:
                if (worker.host, worker.index) == (self._roster.hosts[0], index):
                    worker.process_ended = reason
                    worker.status = status
        now = time.monotonic()
        for worker in workers:
            if worker.decide_end(now, SETTLE):
                self.calls.fail_calls(make_lost_outcome(worker.rank, worker.lost, worker.status))

    # --- ending -----------------------------------------------------------------------------

    def close(self, *, wait: bool = True) -> None:
        """End every worker: idle ones exit by themselves, busy ones are terminated."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        self._is_closing = True
        self._local.wake()
        if wait:
            self._thread.join()

    def abandon(self) -> None:
        """Close a driver that is garbage-collected, possibly not on the main thread."""
        self.close(wait=threading.current_thread() is threading.main_thread())

    def _finish(self) -> None:
        for connection in self._roster.connections:
            connection.post({"kind": "end"})
        self._local.close(waits=not self.calls.pending())
        self._listener.close()
        for connection in self._roster.connections:
            connection.close()
        for rank in {future.rank for future in self.calls.pending()}:
            reason = "had not returned from a call when the driver was closed"
            self.calls.fail_calls(make_lost_outcome(rank, reason))
        self.output.wake()
        self.output.show_if_no_caller_waits()


def _listen(address: str, port: int) -> socket.socket:
    try:
        return listen(address, port)
    except UsageError as error:
        raise UsageError(
            f"a driver cannot listen at {address}:{port} here: the address is unknown, or the "
            f"port is in use or not permitted; choose another, or port 0 for a free one"
        ) from error
