"""A worker: a rank that does what the driver, and other workers, call for.

    driver                              worker
      <── hello {port, pid} ──────────────│  where other workers reach it
      ── join {rank, variables, peers} ──>│  lockstep.init()
      <── joined ─────────────────────────│
      ── call {number, keep, lends} ─────>│  function(*args) on its main thread
      <── value | kept | error {number} ──│
      ── lend, drop {object, token} ─────>│  references; at once, on the receiving thread
      ── gone {rank} ────────────────────>│  a worker that ended holds nothing any more
      ── look ───────────────────────────>│  at once, on the receiving thread
      <── seen {waits} ───────────────────│  is the main thread in a collective?
      ── leave ──────────────────────────>│  lockstep.shutdown(): nobody waits for it any more
      ── end ────────────────────────────>│

Workers call each other over direct links, made at the first call: what they send
each other does not pass the driver. Both ends prove which worker they are, so that
a call for one worker is never answered by another one.
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

from lockstep.errors import LockstepError, RankError
from lockstep.launcher.rank_process import describe_error
from lockstep.launcher.world import init, shutdown
from lockstep.remote.calls import DRIVER, Calls, ended
from lockstep.remote.connection import dial
from lockstep.remote.frame import Frame, Wire
from lockstep.remote.future import SETTLE
from lockstep.remote.hang_recovery import in_collective
from lockstep.remote.identity import Credentials, Identity, Role
from lockstep.remote.link import Link
from lockstep.remote.listener import Listener
from lockstep.remote.objects import Address, Objects, Tokens
from lockstep.remote.task_queue import TaskQueue

__all__ = ["attend"]

OURS = os.path.dirname(os.path.abspath(__file__))


def attend(address: str, port: int, credentials: Credentials, silence: float) -> None:
    """Serve the driver at `address`:`port` until it ends.

    Raises RendezvousError where nobody answers there, UsageError for another key.
    """
    worker = Server(address, port, credentials, silence)
    try:
        worker.serve()
    finally:
        worker.close()


class Server:
    """What a worker holds: its objects, its links, its calls to others."""

    def __init__(self, address: str, port: int, credentials: Credentials, silence: float) -> None:
        self._credentials, self._silence = credentials, silence
        self.rank = DRIVER
        self.queue, self.objects = TaskQueue(), Objects()
        self._peers: list[tuple[str, int, Identity]] = []  # in rank order
        self._ranks: dict[Identity, int] = {}
        self._dialed: dict[int, Link] = {}
        self._gone: dict[int, str] = {}
        self._accepted: list[Link] = []
        self._dialing = threading.Lock()
        wire = dial(address, port, credentials, Identity(Role.DRIVER), silence, silence)
        own = wire.end.getsockname()[0]  # the interface by which the driver is reached
        self._listener = Listener(own, 0, credentials, silence, self._accept)
        self._driver = Link(wire, self._take_from_driver, self._lose_driver)

    def serve(self) -> None:
        """Say hello and work until the driver ends it, or is lost."""
        hello = {"port": self._listener.port, "pid": os.getpid()}
        self._driver.begin().post(Frame({"kind": "hello", **hello}))
        self.queue.work()

    def close(self) -> None:
        """Send the last answers and hang up."""
        self._listener.close()
        for link in [self._driver, *self._accepted, *self._dialed.values()]:
            link.close()

    # --- as the routes of its own calls ---------------------------------------------------

    def post(self, rank: int, frame: Frame) -> None:
        """Send a frame to another worker; RankError where that has ended."""
        (self._driver if rank == DRIVER else self._link_to(rank)).post(frame)

    def post_drop(self, address: Address) -> None:
        """Tell a reference's owner; by way of the driver where there is no link to it."""
        header = {"kind": "drop", "owner": address.owner, **_key_of(address)}
        (self._dialed.get(address.owner) or self._driver).post(Frame(header))

    def _link_to(self, rank: int) -> Link:
        with self._dialing:
            if rank in self._gone:
                raise RankError(f"rank {rank} {self._gone[rank]}, so it cannot be called")
            if rank not in self._dialed:
                address, port, called = self._peers[rank]
                try:
                    wire = dial(address, port, self._credentials, called, self._silence)
                except LockstepError as error:
                    raise RankError(f"rank {rank} cannot be called: {error}") from error
                take, lose = partial(self._take, rank), partial(self._lose_peer, rank)
                self._dialed[rank] = Link(wire, take, lose).begin()
            return self._dialed[rank]

    # --- what comes, on the receiving threads -------------------------------------------

    def _accept(self, wire: Wire, caller: Identity) -> None:
        take = partial(self._take_from_worker, caller)
        self._accepted.append(Link(wire, take, lambda link, reason: None).begin())

    def _take_from_driver(self, link: Link, frame: Frame) -> None:
        header = frame.header
        match frame.kind:
            case "gone":
                self._lose(header["rank"], header["how"])
            case "look":
                link.post(Frame({"kind": "seen", "waits": in_collective()}))
            case "leave":
                self.queue.put(shutdown, of_driver=False)
            case "join":
                self.queue.put(partial(self._join, header), of_driver=True)
            case "end":
                self.queue.end()
            case _:
                self._take(DRIVER, link, frame)

    def _take_from_worker(self, caller: Identity, link: Link, frame: Frame) -> None:
        self._take(self._ranks[caller], link, frame)

    def _take(self, rank: int, link: Link, frame: Frame) -> None:
        header = frame.header
        match frame.kind:
            case "call":
                for number, token in header["lends"]:
                    self.objects.lend(number, token, rank)
                job = partial(self._answer, rank, link, frame)
                self.queue.put(job, of_driver=rank == DRIVER)
            case "value" | "kept" | "error":
                self.calls.settle(rank, frame)
                self.queue.wake()
            case "lend":
                self.objects.lend(header["object"], header["token"], header["holder"])
            case "drop":
                self._let_go([self.objects.drop(header["object"], header["token"])])

    def _let_go(self, things: list[Any]) -> None:
        """Let the main thread run the destructors of what nobody holds any more."""
        if any(thing is not None for thing in things):
            self.queue.put(things.clear, of_driver=False)

    def _lose_driver(self, link: Link, reason: str) -> None:
        self.queue.end()

    def _lose_peer(self, rank: int, link: Link, reason: str) -> None:
        # The driver soon says what became of it.
        self.queue.wait(lambda: rank in self._gone, time.monotonic() + SETTLE)
        self._lose(rank, reason)

    def _lose(self, rank: int, how: str) -> None:
        with self._dialing:
            self._gone.setdefault(rank, how)
        self._let_go(self.objects.forget(rank))
        self.calls.lose(ended(rank, how))
        self.queue.wake()

    # --- what is done, on the main thread -------------------------------------------------

    def _join(self, header: dict[str, Any]) -> None:
        self.rank = header["rank"]
        self._peers = [
            (address, port, Identity(Role.WORKER, host, index))
            for address, port, host, index in header["peers"]
        ]
        self._ranks = {identity: rank for rank, (_, _, identity) in enumerate(self._peers)}
        self.calls = Calls(self.rank, self, self.queue.wait)
        self.calls.resolve = self._resolve
        self._tokens = Tokens(self.rank)
        os.environ.update(header["variables"])
        answer: dict[str, Any] = {"kind": "joined"}
        try:
            init(**header["world"])
        except Exception as error:  # whatever it is, the driver waits for an answer
            answer["report"] = describe_error(error)
        self._driver.post(Frame(answer))

    def _resolve(self, address: Address) -> Any:
        """Return the object itself at home, elsewhere a reference."""
        if address.owner != self.rank:
            return self.calls.reference(address)
        value = self.objects.value(address.number)
        self.objects.drop(address.number, address.token)
        return value

    def _answer(self, holder: int, link: Link, frame: Frame) -> None:
        number = frame.header["number"]
        try:
            function, args, options = self.calls.unpack(frame.pieces)
            value = function(*args, **options)
            if frame.header["keep"]:
                answer = Frame({"kind": "kept", "address": self._keep(value, holder)})
            else:
                answer = Frame({"kind": "value"}, self.calls.pack(holder, value))
        except BaseException as error:  # whatever it is, somebody waits for an answer
            error.__traceback__ = _own_frames(error.__traceback__)
            answer = Frame(
                {"kind": "error", "report": describe_error(error)}, self._packed(holder, error)
            )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        answer.header["number"] = number
        link.post(answer)

    def _keep(self, value: Any, holder: int) -> dict[str, Any]:
        token = self._tokens.new()
        number = self.objects.keep(value, token, holder)
        return asdict(Address(self.rank, number, token, type(value).__qualname__))

    def _packed(self, holder: int, error: BaseException) -> Any:
        """Return the exception itself where it can travel."""
        try:
            return self.calls.pack(holder, error.with_traceback(None))
        except Exception:  # any class may fail to pickle in a way of its own; the report goes alone
            return ()


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drop the frames of the driver's machinery, which say nothing to the user."""
    kept = frames
    while kept is not None and kept.tb_frame.f_code.co_filename.startswith(OURS):
        kept = kept.tb_next
    return kept or frames


def _key_of(address: Address) -> dict[str, int]:
    return {"object": address.number, "token": address.token}
