"""The worker pool: a driver's workers, from their start to their end.

    waiting for workers ──all said hello──> joining ──all joined──> at work ──> ended
            │ deadline, or one ended          │ one could not
            └───────────── ended, with the sentence that says why ──────────────^

Three kinds of threads: each link's two, and one that watches the processes of
this host, reads what they print, and settles answers after what was printed
before them. All are daemons, and none holds the driver itself, so that a driver
that is forgotten is collected, and its workers with it.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lockstep.errors import LockstepError, RankError, RendezvousError, UsageError
from lockstep.launcher.failure_attribution import describe_end
from lockstep.launcher.fork_server import get_fork_server
from lockstep.launcher.output import RankOutput
from lockstep.launcher.supervisor import GRACE, TICK, RankSupervisor
from lockstep.remote.calls import DRIVER, Calls, ended
from lockstep.remote.frame import Forged, Frame, Wire
from lockstep.remote.future import SETTLE, Future, gather
from lockstep.remote.hang_recovery import ENOUGH, HangRecovery
from lockstep.remote.identity import SESSION, Credentials, Identity, Role
from lockstep.remote.link import Link
from lockstep.remote.listener import Listener
from lockstep.remote.node_agent import start_worker
from lockstep.remote.objects import Address
from lockstep.remote.output_forwarder import Console, OutputForwarder
from lockstep.remote.worker_handle import WorkerHandle, places

__all__ = ["WorkerPool"]


class WorkerPool:
    """`nprocs` workers of this host and `remote` ones that connect to `address`:`port`.

    `world` is what every worker gives to `lockstep.init`.
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
        self.handles: list[WorkerHandle] = []  # in rank order, once all are there
        self._nprocs, self._remote, self._address = nprocs, remote, address
        own = Identity(Role.DRIVER)
        self._credentials = Credentials(key, own, secrets.token_bytes(SESSION))
        self._silence, self._world = silence, world
        self._expected = {Identity(Role.WORKER, 0, index) for index in range(nprocs)}
        self._arrived: dict[Link, WorkerHandle] = {}
        self._hosts: dict[Link, int] = {}
        self._links: list[Link] = []
        self._answers: deque[tuple[int, Frame]] = deque()
        self._recoveries: list[HangRecovery] = []
        self._broken = ""  # why the workers' world has ended
        self._owner = os.getpid()
        self._closing = False
        self._lock = threading.Lock()
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listener = Listener(
            address, port, self._credentials, silence, self._accept, self._refuse
        )
        self.port = self._listener.port
        self._job = RankSupervisor(get_fork_server(for_training=True).open_launch(), range(nprocs))
        self._job.add_reader(self._wake[0], self._woken)
        self._meeting = (address, self._job.serve_store(address, 0))
        self._store = "" if remote else self._job.create_store()
        for rank in range(nprocs):
            self._start(rank)
        self._thread = threading.Thread(target=self._watch, name="lockstep driver", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # later than the template's, so called before that waits

    # --- beginning ------------------------------------------------------------------------

    def _start(self, rank: int) -> None:
        credentials = replace(self._credentials, own=Identity(Role.WORKER, 0, rank))
        arguments = (self._address, self.port, credentials, self._silence)
        consoles = (Console(self.output, "stdout"), Console(self.output, "stderr"))
        output = RankOutput(rank, None, consoles)  # type: ignore[arg-type]
        start_worker(self._job, rank, arguments, output)

    def gather(self, deadline: float) -> None:
        """Wait until every worker is there and has joined the world.

        Raises RendezvousError at the deadline, RankError where a worker ended before.
        """
        self._await(lambda: len(self._arrived) == self.size, deadline, "came")
        with self._lock:
            self.handles = places(self._arrived.values())
        peers = [(*handle.place, handle.host, handle.index) for handle in self.handles]
        run = secrets.token_hex(4)
        for handle in self.handles:
            variables = handle.variables(self.handles, *self._meeting, run, self._store)
            header = {"kind": "join", "rank": handle.rank, "peers": peers, "variables": variables}
            handle.link.post(Frame({**header, "world": self._world}))
        self._await(lambda: all(handle.joined for handle in self.handles), deadline, "joined")

    def _await(self, done: Callable[[], bool], deadline: float, what: str) -> None:
        self.output.wait(lambda: done() or bool(self._failure()), deadline)
        if failure := self._failure():
            raise failure
        if not done():
            there = len(self._arrived) if what == "came" else sum(m.joined for m in self.handles)
            raise RendezvousError(
                f"{there} of {self.size} workers {what} in time: see whether `lockstep worker "
                f"--connect {self._address}:{self.port}` was started on every other host"
            )

    def _failure(self) -> Exception | None:
        """Return what kept a worker from joining: its own error, or how it ended."""
        for handle in list(self._arrived.values()):
            if handle.report is not None:
                return RankError(handle.report["message"])
            if handle.how:
                return RankError(f"rank {handle.rank} {handle.how} before it had joined")
        for rank in range(self._nprocs):
            outcome = self._job.outcomes[rank]
            if outcome.status is not None or outcome.error is not None:
                return RankError(f"rank {rank} {describe_end(outcome)} before it had joined")
        return None

    # --- calls on all workers ---------------------------------------------------------------

    def together(self, futures: Sequence[Future]) -> list[Any]:
        """Return the values of a call on all workers; raise the error that explains a failure.

        Workers that wait in a collective for one that raised are let go.
        """
        try:
            return gather(futures, self.output.wait)
        except LockstepError as error:
            if self._broken:
                error.add_note(self._broken)
            else:
                self._recoveries.append(HangRecovery(futures, str(error)))
            raise

    def require_world(self) -> None:
        """Wait until nobody waits for a worker that raised; RankError where the world has ended."""
        self.output.wait(lambda: not self._recoveries or bool(self._broken) or self._closing, None)
        if self._broken:
            raise RankError(self._broken)

    # --- as the routes of the driver's calls ------------------------------------------

    def post(self, rank: int, frame: Frame) -> None:
        """Send a frame to a worker; RankError where that has ended."""
        handle = self.handle(rank)
        if handle.how:
            raise RankError(f"rank {rank} {handle.how}, so it cannot be called")
        handle.link.post(frame)

    def post_drop(self, address: Address) -> None:
        """Tell a worker that a reference of the driver's is dropped."""
        if not self._closing and os.getpid() == self._owner:
            header = {"kind": "drop", "object": address.number, "token": address.token}
            self.handles[address.owner].link.post(Frame(header))

    def handle(self, rank: int) -> WorkerHandle:
        """Return a worker by its rank; UsageError where there is none."""
        if self._closing:
            raise UsageError("the driver has ended: its workers and their objects are gone")
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank}: the driver has ranks 0 to {self.size - 1}")
        return self.handles[rank]

    # --- what comes, on the links' threads --------------------------------------------

    def _accept(self, wire: Wire, caller: Identity) -> None:
        remote = caller.role is Role.HOST
        take = self._take_from_host if remote else partial(self._take_from_worker, caller)
        link = Link(wire, take, self._cut)
        with self._lock:
            self._links.append(link)
        link.begin()

    def _refuse(self, line: str) -> None:
        self.output.put("stderr", f"lockstep: {line}\n")
        self._notify()

    def _take_from_worker(self, caller: Identity, link: Link, frame: Frame) -> None:
        header = frame.header
        if frame.kind == "hello":
            self._enter(caller, link, header)
            return
        handle = self._arrived[link]
        match frame.kind:
            case "value" | "kept" | "error":
                self._answers.append((handle.rank, frame))
                self._notify()
            case "drop":
                self.handles[header["owner"]].link.post(frame)
            case "joined":
                handle.joined = "report" not in header
                handle.report = header.get("report")
                self.output.wake()
            case "seen":
                handle.waits = handle.waits + 1 if header["waits"] else 0

    def _take_from_host(self, link: Link, frame: Frame) -> None:
        match frame.kind:
            case "host":
                self._welcome(link, frame.header["workers"])
            case "output":
                self._show(link, frame.header)
            case "ended":
                self._end_remote(link, frame.header)

    def _enter(self, caller: Identity, link: Link, header: dict[str, Any]) -> None:
        """Let a worker in, once and over one link."""
        with self._lock:
            expected = caller in self._expected
            if expected:
                self._expected.remove(caller)
                place = (link.peer, header["port"])
                self._arrived[link] = WorkerHandle(link, caller.host, caller.index, place)
        if not expected:
            self._refuse(f"a connection from {link.peer} was refused: {caller} is here already")
            raise Forged("a name that is not expected")
        self.output.wake()

    def _welcome(self, link: Link, workers: int) -> None:
        """Let another host's workers in, as many as are still missing."""
        with self._lock:
            welcome = workers <= self._remote
            self._remote -= workers if welcome else 0
            self._hosts[link] = number = len(self._hosts) + 1
            if welcome:
                self._expected |= {Identity(Role.WORKER, number, i) for i in range(workers)}
        if welcome:
            session = self._credentials.session.hex()
            link.post(Frame({"kind": "welcome", "host": number, "session": session}))
        else:
            reason = f"the driver waits for {self._remote} more, not for {workers}"
            link.post(Frame({"kind": "refused", "reason": reason}))

    def _show(self, link: Link, header: dict[str, Any]) -> None:
        handle = self._of_host(link, header["index"])
        name = "?" if handle is None else handle.rank
        for line in header["text"].splitlines():
            self.output.put(header["stream"], f"[{name}] {line}\n")
        self._notify()

    def _end_remote(self, link: Link, header: dict[str, Any]) -> None:
        handle = self._of_host(link, header["index"])
        if handle is not None:
            handle.ended, handle.status = header["how"], header["status"]
            self._notify()

    def _of_host(self, link: Link, index: int) -> WorkerHandle | None:
        with self._lock:
            here = [m for m in self._arrived.values() if m.host == self._hosts.get(link)]
        return next((handle for handle in here if handle.index == index), None)

    def _cut(self, link: Link, reason: str) -> None:
        if link in self._arrived:
            self._arrived[link].cut = reason
            self._notify()

    def _notify(self) -> None:
        try:
            os.write(self._wake[1], b"!")
        except OSError:  # full of wake-ups already, or closed at the end
            return

    # --- what is watched, on the driver's own thread --------------------------------------

    def _watch(self) -> None:
        while not self._closing:
            self._job.process_events(TICK)
            self._read_all()
            while self._answers:
                self.calls.settle(*self._answers.popleft())
            self._reap()
            for recovery in list(self._recoveries):
                if self._recovered(recovery):
                    self._recoveries.remove(recovery)
            self.output.wake()
            self.output.show_unless_awaited()
        self._finish()

    def _woken(self) -> bool:
        os.read(self._wake[0], 1 << 12)
        return True

    def _read_all(self) -> None:
        """Take in all that was printed before the answers that are here."""
        before = -1
        while self._answers and before != self.output.written:
            before = self.output.written
            self._job.process_events(0)

    def _reap(self) -> None:
        """Say of a worker that ended how it did, as soon as both its ends are known."""
        now = time.monotonic()
        for handle in list(self._arrived.values()):
            if not handle.host and self._job.outcomes[handle.index].status is not None:
                outcome = self._job.outcomes[handle.index]
                handle.ended, handle.status = describe_end(outcome), outcome.status
            if handle.how or not (handle.cut or handle.ended):
                continue
            handle.noticed = handle.noticed or now
            if (handle.cut and handle.ended) or now > handle.noticed + SETTLE:
                handle.how = handle.ended or handle.cut
                self._tell_end(handle)

    def _tell_end(self, handle: WorkerHandle) -> None:
        self.calls.lose(ended(handle.rank, handle.how, handle.status))
        for other in self.handles:
            if other is not handle and not other.how:
                other.link.post(Frame({"kind": "gone", "rank": handle.rank, "how": handle.how}))

    def _recovered(self, recovery: HangRecovery) -> bool:
        """See after those that may wait for one that raised; return whether nobody does any more.

        The death of a worker they hear of from the backend.
        """
        busy = [self.handles[rank] for rank in recovery.busy()]
        raised = [self.handles[rank] for rank in recovery.raised()]
        if not busy or any(handle.how for handle in raised):
            return True
        if recovery.left:
            return self._ended_in_time(recovery, raised)
        if recovery.looks > ENOUGH and all(handle.waits >= ENOUGH for handle in busy):
            self._broken = (
                f"the world of these workers has ended, because the others waited in a collective "
                f"after this: {recovery.sentence}; start another driver"
            )
            recovery.left = time.monotonic()
            for handle in raised:
                handle.link.post(Frame({"kind": "leave"}))
        elif recovery.due():
            for handle in busy:
                handle.waits = handle.waits if recovery.looks > 1 else 0
                handle.link.post(Frame({"kind": "look"}))
        return False

    def _ended_in_time(self, recovery: HangRecovery, raised: Sequence[WorkerHandle]) -> bool:
        """End those that raised, where their leaving did not help; return whether that was done."""
        if time.monotonic() < recovery.left + SETTLE:
            return False
        for handle in raised:
            handle.link.post(Frame({"kind": "end"}))
        return True

    # --- ending -----------------------------------------------------------------------------

    def close(self, *, wait: bool = True) -> None:
        """End every worker: an idle one ends by itself, a busy one is ended."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        self._closing = True
        self._notify()
        if wait:
            self._thread.join()

    def abandon(self) -> None:
        """Close a driver that was forgotten; the garbage collector may run on any thread."""
        self.close(wait=threading.current_thread() is threading.main_thread())

    def _finish(self) -> None:
        busy = bool(self.calls.awaited())
        for link in self._links:
            link.post(Frame({"kind": "end"}))
        until = time.monotonic() + (0 if busy else GRACE)
        while self._job.running and time.monotonic() < until:
            self._job.process_events(TICK)
        self._job.terminate()
        self._listener.close()
        for link in self._links:
            link.close()
        for rank in {future.rank for future in self.calls.awaited()}:
            self.calls.lose(ended(rank, "had not answered when the driver ended"))
        for descriptor in self._wake:
            os.close(descriptor)
        self.output.wake()
        self.output.show_unless_awaited()
