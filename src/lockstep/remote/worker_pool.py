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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lockstep.kernel.errors import LockstepError, RankError, RendezvousError, UsageError
from lockstep.launcher.environment import RankEnvironment
from lockstep.launcher.failure_attribution import describe_end
from lockstep.launcher.fork_server import get_fork_server
from lockstep.launcher.listening_socket import listen
from lockstep.launcher.output import RankOutput
from lockstep.launcher.supervisor import GRACE, TICK, RankSupervisor
from lockstep.remote.calls import DRIVER, Calls, make_lost_outcome
from lockstep.remote.connection import Connection
from lockstep.remote.credentials import KEY_SOURCE, derive_store_secret
from lockstep.remote.future import SETTLE, Future, gather
from lockstep.remote.hang_recovery import CHECKS, HangRecovery
from lockstep.remote.node_agent import start_worker
from lockstep.remote.objects import ObjectAddress
from lockstep.remote.output_forwarder import ForwardedStream, OutputForwarder
from lockstep.transport.credentials import SESSION, Credentials, Identity, Role
from lockstep.transport.frame import ForgedFrame, Frame, FrameSocket
from lockstep.transport.listener import Listener

__all__ = ["WorkerHandle", "WorkerPool"]


@dataclass(eq=False)
class WorkerHandle:
    """The state of one worker in its driver.

    Attributes:
        connection: Its connection to the driver.
        host: The number of its host; 0 is the driver's own.
        index: Its number on that host.
        endpoint: The address and port at which other workers connect to it.
        rank: Its rank, once all workers have connected.
        has_joined: Whether it has joined the world.
        error: The report of the error that kept it from joining.
        connection_lost: The reason why its connection was lost; empty while it exists.
        process_ended: The way in which its process ended; empty while it runs.
        status: The exit status of its process.
        lost: The way in which the worker ended, from `process_ended`, else `connection_lost`;
            empty while it is usable.
        lost_since: The `time.monotonic()` time at which either of these was first noticed.
        waits: The number of checks in a row that found it in a collective.
    """

    connection: Connection
    host: int
    index: int
    endpoint: tuple[str, int]
    rank: int = -1
    has_joined: bool = False
    error: dict[str, Any] | None = None
    connection_lost: str = ""
    process_ended: str = ""
    status: int | None = None
    lost: str = ""
    lost_since: float = 0.0
    waits: int = 0

    def variables(
        self, handles: Sequence[WorkerHandle], address: str, port: int, run_id: str, store: str
    ) -> dict[str, str]:
        """Return the environment with which this worker joins the world of `handles`."""
        sizes = Counter(handle.host for handle in handles)
        hosts = list(sizes)  # in rank order
        environment = RankEnvironment(
            sizes[self.host],
            address,
            port,
            run_id,
            nnodes=len(hosts),
            node_rank=hosts.index(self.host),
            store=store,
        )
        # torchrun's formulas do not apply: hosts may have different numbers of workers.
        rank, world_size = str(self.rank), str(len(handles))
        return environment.variables(self.index) | {
            "RANK": rank,
            "ROLE_RANK": rank,
            "WORLD_SIZE": world_size,
            "ROLE_WORLD_SIZE": world_size,
        }


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
        self.size, self.output = nprocs + remote, OutputForwarder()
        self.calls = Calls(DRIVER, self, self.output.wait)
        self.handles: list[WorkerHandle] = []  # in rank order, once all have connected
        self._nprocs, self._remote, self._address = nprocs, remote, address
        own = Identity(Role.DRIVER)
        self._credentials = Credentials(key, own, secrets.token_bytes(SESSION), KEY_SOURCE)
        self._silence, self._world = silence, world
        self._expected = {Identity(Role.WORKER, 0, index) for index in range(nprocs)}
        self._handles: dict[Connection, WorkerHandle] = {}
        self._hosts: dict[Connection, int] = {}
        self._connections: list[Connection] = []
        self._answers: deque[tuple[int, Frame]] = deque()
        self._recoveries: list[HangRecovery] = []
        self._world_error = ""  # why the workers' world has ended
        self._owner = os.getpid()
        self._is_closing = False
        self._lock = threading.Lock()
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        listening = _listen(address, port)
        server = get_fork_server(for_training=True)  # first, as it takes longest to start
        self._listener = Listener(
            listening, self._credentials, silence, self._accept, self._print_refusal
        )
        self.port = self._listener.port
        self._local = RankSupervisor(server.open_launch(), range(nprocs))
        self._local.readers.add(self._wake[0], self._on_wake)
        secret = derive_store_secret(key)
        self._master = (address, self._local.stores.serve(address, 0, secret=secret))
        self._store = "" if remote else self._local.stores.create()
        for rank in range(nprocs):
            self._start(rank)
        self._thread = threading.Thread(target=self._watch, name="lockstep driver", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # LIFO: runs before the fork server is closed

    # --- starting -------------------------------------------------------------------------

    def _start(self, rank: int) -> None:
        credentials = replace(self._credentials, own=Identity(Role.WORKER, 0, rank))
        arguments = (self._address, self.port, credentials, self._silence)
        stdout = ForwardedStream(partial(self.output.put, "stdout"))
        stderr = ForwardedStream(partial(self.output.put, "stderr"))
        output = RankOutput(rank, None, (stdout, stderr))  # type: ignore[arg-type]
        start_worker(self._local, rank, arguments, output)

    def wait_for_workers(self, deadline: float) -> None:
        """Wait until every worker has connected and joined the world.

        Raises:
            RendezvousError: The deadline passed.
            RankError: A worker exited before.
        """
        self._wait(lambda: len(self._handles) == self.size, deadline, "connected")
        with self._lock:
            self.handles = _assign_ranks(self._handles.values())
        peers = [(*handle.endpoint, handle.host, handle.index) for handle in self.handles]
        run_id = secrets.token_hex(4)
        for handle in self.handles:
            variables = handle.variables(self.handles, *self._master, run_id, self._store)
            header = {"kind": "join", "rank": handle.rank, "peers": peers, "variables": variables}
            handle.connection.post(Frame({**header, "world": self._world}))
        self._wait(lambda: all(handle.has_joined for handle in self.handles), deadline, "joined")

    def _wait(self, done: Callable[[], bool], deadline: float, what: str) -> None:
        self.output.wait(lambda: done() or bool(self._startup_error()), deadline)
        if error := self._startup_error():
            raise error
        if not done():
            joined = sum(handle.has_joined for handle in self.handles)
            count = len(self._handles) if what == "connected" else joined
            raise RendezvousError(
                f"{count} of {self.size} workers {what} in time: check that `lockstep worker "
                f"--connect {self._address}:{self.port}` was started on every other host"
            )

    def _startup_error(self) -> Exception | None:
        """Return why a worker cannot join: its own error, or how it ended."""
        for handle in list(self._handles.values()):
            if handle.error is not None:
                return RankError(handle.error["message"])
            if handle.lost:
                return RankError(f"rank {handle.rank} {handle.lost} before it had joined")
        for rank in range(self._nprocs):
            outcome = self._local.outcomes[rank]
            if outcome.status is not None or outcome.error is not None:
                return RankError(f"rank {rank} {describe_end(outcome)} before it had joined")
        return None

    # --- calls on all workers ---------------------------------------------------------------

    def gather_values(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Return the values of a call on all workers; raise the error that is the cause.

        Workers that wait in a collective for one that raised are released.
        """
        try:
            return gather(futures, self.output.wait)
        except LockstepError as error:
            if self._world_error:
                error.add_note(self._world_error)
            else:
                self._recoveries.append(HangRecovery(futures, str(error)))
            raise

    def require_world(self) -> None:
        """Wait until hang recovery is done; raise RankError if the world has ended."""

        def is_decided() -> bool:
            return not self._recoveries or bool(self._world_error) or self._is_closing

        self.output.wait(is_decided, None)
        if self._world_error:
            raise RankError(self._world_error)

    # --- the transport of the driver's calls ------------------------------------------

    def post(self, rank: int, frame: Frame) -> None:
        """Send a frame to a worker; raise RankError if the worker is lost."""
        handle = self.handle(rank)
        if handle.lost:
            raise RankError(f"rank {rank} {handle.lost}, so it cannot be called")
        handle.connection.post(frame)

    def post_drop(self, address: ObjectAddress) -> None:
        """Notify a worker that the driver has dropped a reference."""
        if not self._is_closing and os.getpid() == self._owner:
            header = {"kind": "drop", "object": address.number, "token": address.token}
            self.handles[address.owner].connection.post(Frame(header))

    def handle(self, rank: int) -> WorkerHandle:
        """Return a worker by its rank; raise UsageError if there is no such worker."""
        if self._is_closing:
            raise UsageError("the driver is closed: its workers and their objects are gone")
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank}: the driver has ranks 0 to {self.size - 1}")
        return self.handles[rank]

    # --- on the connections' threads --------------------------------------------------

    def _accept(self, frames: FrameSocket, caller: Identity) -> None:
        is_agent = caller.role is Role.NODE_AGENT
        on_frame = self._on_agent_frame if is_agent else partial(self._on_worker_frame, caller)
        connection = Connection(frames, on_frame, self._on_lost)
        with self._lock:
            self._connections.append(connection)
        connection.start()

    def _print_refusal(self, line: str) -> None:
        self.output.put("stderr", f"lockstep: {line}\n")
        self._notify()

    def _on_worker_frame(self, caller: Identity, connection: Connection, frame: Frame) -> None:
        header = frame.header
        if frame.kind == "hello":
            self._add_worker(caller, connection, header)
            return
        handle = self._handles[connection]
        match frame.kind:
            case "value" | "kept" | "error":
                self._answers.append((handle.rank, frame))
                self._notify()
            case "drop":
                self.handles[header["owner"]].connection.post(frame)
            case "joined":
                handle.has_joined = "report" not in header
                handle.error = header.get("report")
                self.output.wake()
            case "seen":
                handle.waits = handle.waits + 1 if header["waits"] else 0

    def _on_agent_frame(self, connection: Connection, frame: Frame) -> None:
        match frame.kind:
            case "host":
                self._add_host(connection, frame.header["workers"])
            case "output":
                self._print_output(connection, frame.header)
            case "ended":
                self._on_remote_exit(connection, frame.header)

    def _add_worker(self, caller: Identity, connection: Connection, header: dict[str, Any]) -> None:
        """Add a worker; refuse a second connection of the same worker."""
        with self._lock:
            is_expected = caller in self._expected
            if is_expected:
                self._expected.remove(caller)
                endpoint = (connection.peer, header["port"])
                handle = WorkerHandle(connection, caller.host, caller.index, endpoint)
                self._handles[connection] = handle
        if not is_expected:
            self._print_refusal(
                f"a connection from {connection.peer} was refused: {caller} is connected already"
            )
            raise ForgedFrame("the name of a worker that is connected already")
        self.output.wake()

    def _add_host(self, connection: Connection, workers: int) -> None:
        """Accept the workers of another host, if the driver still needs that many."""
        with self._lock:
            is_welcome = workers <= self._remote
            self._remote -= workers if is_welcome else 0
            self._hosts[connection] = number = len(self._hosts) + 1
            if is_welcome:
                self._expected |= {Identity(Role.WORKER, number, i) for i in range(workers)}
        if is_welcome:
            session = self._credentials.session.hex()
            connection.post(Frame({"kind": "welcome", "host": number, "session": session}))
        else:
            reason = f"the driver waits for {self._remote} more workers, not for {workers}"
            connection.post(Frame({"kind": "refused", "reason": reason}))

    def _print_output(self, connection: Connection, header: dict[str, Any]) -> None:
        handle = self._find_remote(connection, header["index"])
        rank = "?" if handle is None else handle.rank
        for line in header["text"].splitlines():
            self.output.put(header["stream"], f"[{rank}] {line}\n")
        self._notify()

    def _on_remote_exit(self, connection: Connection, header: dict[str, Any]) -> None:
        handle = self._find_remote(connection, header["index"])
        if handle is not None:
            handle.process_ended, handle.status = header["reason"], header["status"]
            self._notify()

    def _find_remote(self, connection: Connection, index: int) -> WorkerHandle | None:
        with self._lock:
            host = self._hosts.get(connection)
            found = [handle for handle in self._handles.values() if handle.host == host]
        return next((handle for handle in found if handle.index == index), None)

    def _on_lost(self, connection: Connection, reason: str) -> None:
        if connection in self._handles:
            self._handles[connection].connection_lost = reason
            self._notify()

    def _notify(self) -> None:
        try:
            os.write(self._wake[1], b"!")
        except OSError:  # the pipe is full of wake-ups already, or closed at the end
            return

    # --- on the driver's own thread -------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_closing:
            self._local.process_events(TICK)
            self._read_output()
            while self._answers:
                self.calls.on_answer(*self._answers.popleft())
            self._reap()
            for recovery in list(self._recoveries):
                if self._continue_recovery(recovery):
                    self._recoveries.remove(recovery)
            self.output.wake()
            self.output.show_if_no_caller_waits()
        self._finish()

    def _on_wake(self) -> bool:
        os.read(self._wake[0], 1 << 12)
        return True

    def _read_output(self) -> None:
        """Read all output that was printed before the answers that have arrived."""
        before = -1
        while self._answers and before != self.output.received:
            before = self.output.received
            self._local.process_events(0)

    def _reap(self) -> None:
        """Decide how a worker ended, once its connection and its process have ended.

        If only one of them has ended, decide after `SETTLE` seconds.
        """
        now = time.monotonic()
        for handle in list(self._handles.values()):
            if not handle.host and self._local.outcomes[handle.index].status is not None:
                outcome = self._local.outcomes[handle.index]
                handle.process_ended, handle.status = describe_end(outcome), outcome.status
            if handle.lost or not (handle.connection_lost or handle.process_ended):
                continue
            handle.lost_since = handle.lost_since or now
            is_complete = handle.connection_lost and handle.process_ended
            if is_complete or now > handle.lost_since + SETTLE:
                handle.lost = handle.process_ended or handle.connection_lost
                self._announce_loss(handle)

    def _announce_loss(self, handle: WorkerHandle) -> None:
        self.calls.fail_calls(make_lost_outcome(handle.rank, handle.lost, handle.status))
        for other in self.handles:
            if other is not handle and not other.lost:
                header = {"kind": "gone", "rank": handle.rank, "reason": handle.lost}
                other.connection.post(Frame(header))

    def _continue_recovery(self, recovery: HangRecovery) -> bool:
        """Take the next step of a hang recovery; return whether it is done.

        Recovery is not needed after the death of a worker: the backend reports it to the others.
        """
        busy = [self.handles[rank] for rank in recovery.busy()]
        failed = [self.handles[rank] for rank in recovery.failed()]
        if not busy or any(handle.lost for handle in failed):
            return True
        if recovery.left_at:
            return self._end_failed_workers(recovery, failed)
        if recovery.checks > CHECKS and all(handle.waits >= CHECKS for handle in busy):
            self._world_error = (
                f"the world of these workers has ended, because the others waited in a collective "
                f"after this error: {recovery.reason}; start another driver"
            )
            recovery.left_at = time.monotonic()
            for handle in failed:
                handle.connection.post(Frame({"kind": "leave"}))
        elif recovery.start_check():
            for handle in busy:
                handle.waits = handle.waits if recovery.checks > 1 else 0
                handle.connection.post(Frame({"kind": "look"}))
        return False

    def _end_failed_workers(self, recovery: HangRecovery, failed: Sequence[WorkerHandle]) -> bool:
        """End the failed workers if leaving the world did not help; return whether it is time."""
        if time.monotonic() < recovery.left_at + SETTLE:
            return False
        for handle in failed:
            handle.connection.post(Frame({"kind": "end"}))
        return True

    # --- ending -----------------------------------------------------------------------------

    def close(self, *, wait: bool = True) -> None:
        """End every worker: idle ones exit by themselves, busy ones are terminated."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        self._is_closing = True
        self._notify()
        if wait:
            self._thread.join()

    def abandon(self) -> None:
        """Close a driver that is garbage-collected, possibly not on the main thread."""
        self.close(wait=threading.current_thread() is threading.main_thread())

    def _finish(self) -> None:
        is_busy = bool(self.calls.pending())
        for connection in self._connections:
            connection.post(Frame({"kind": "end"}))
        until = time.monotonic() + (0 if is_busy else GRACE)
        while self._local.running and time.monotonic() < until:
            self._local.process_events(TICK)
        self._local.terminate()
        self._listener.close()
        for connection in self._connections:
            connection.close()
        for rank in {future.rank for future in self.calls.pending()}:
            reason = "had not returned from a call when the driver was closed"
            self.calls.fail_calls(make_lost_outcome(rank, reason))
        for descriptor in self._wake:
            os.close(descriptor)
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


def _assign_ranks(handles: Iterable[WorkerHandle]) -> list[WorkerHandle]:
    """Assign ranks: the driver's host first, then the others in the order of connection."""
    ordered = sorted(handles, key=lambda handle: (handle.host, handle.index))
    for rank, handle in enumerate(ordered):
        handle.rank = rank
    return ordered
