"""The listener: lets in callers that hold the key, and never waits for any of the others.

    accepted ──first message──> introduced ──proof──> let in
        │                           │
        └── wrong, late, or its place is needed ──> refused

One thread serves all connections that have not proven themselves. There are `PLACES`
for them, and each has `HANDSHAKE` seconds. When all places are taken, a new connection
gets the place of another one: of one that has not introduced itself with the key if
there is any, from the network with the most of them, the oldest first. So strangers
compete with strangers, however many come; a caller with the key that loses its place
before its first message has arrived is told so, and tries again. Connections that are
let in take none of these places.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lockstep.errors import UsageError
from lockstep.launcher.listening_socket import listen
from lockstep.remote.connection import HANDSHAKE, proven
from lockstep.remote.frame import Wire
from lockstep.remote.handshake import Agreement, Refused, Status, Steps, answer
from lockstep.remote.identity import Credentials, Identity
from lockstep.remote.refusals import Refusals

__all__ = ["PLACES", "Listener"]

PLACES = 128  # connections at a time that have not proven themselves yet
BATCH = 16  # connections accepted before those that are there are read again
PAUSE = 0.2  # seconds, while no descriptor is left
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(eq=False)
class Unproven:
    """A connection that has not proven itself, and what it has sent of the current step."""

    end: socket.socket
    address: str
    deadline: float
    steps: Steps
    missing: int
    received: bytes = b""
    introduced: bool = False

    @property
    def network(self) -> bytes:
        """What one caller can have many addresses of: an IPv4 address, an IPv6 /64 network."""
        return ipaddress.ip_address(self.address).packed[:8]


class Listener:
    """Listens at `address`:`port` and gives each proven connection to `accept`.

    Args:
        address: An address of this host.
        port: 0 for a free one.
        credentials: Those of this process.
        silence: Seconds that a proven connection may be silent.
        accept: Called with each proven connection and the caller's identity.
        refused: Called with a line on those that were refused, every few seconds at most.

    Both are called on the listener's own thread, so they must not wait.

    Raises:
        UsageError: It is impossible to listen there.
    """

    def __init__(
        self,
        address: str,
        port: int,
        credentials: Credentials,
        silence: float,
        accept: Callable[[Wire, Identity], None],
        refused: Callable[[str], None] = lambda line: None,
    ) -> None:
        try:
            self._socket = listen(address, port)
        except UsageError as error:
            raise UsageError(
                f"a driver cannot listen at {address}:{port} here: the name is no host's, or the "
                "port is taken or forbidden; choose another, or port 0 for a free one"
            ) from error
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._credentials, self._silence = credentials, silence
        self._accept, self._refused = accept, refused
        self._refusals = Refusals()
        self._unproven: dict[socket.socket, Unproven] = {}  # the oldest first
        self._open = True
        self._bell, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept_waiting)
        self._thread = threading.Thread(target=self._serve, name="lockstep listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._open = False
        self._bell.send(b"!")
        self._thread.join()
        for each in list(self._unproven.values()):
            self._remove(each)
            each.end.close()
        self._report(last=True)
        for end in (self._selector, self._socket, self._bell, self._woken):
            end.close()

    # --- on the listener's thread -----------------------------------------------------------

    def _serve(self) -> None:
        while self._open:
            events = self._selector.select(self._patience())
            # New connections come last: those that are there may introduce themselves first.
            for key, _ in sorted(events, key=lambda event: event[0].fileobj is self._socket):
                key.data()
            for each in list(self._unproven.values()):
                if each.deadline > time.monotonic():
                    break
                self._refuse(each, f"it did not prove its key within {HANDSHAKE:g} s")
            self._report()

    def _patience(self) -> float | None:
        """Return the seconds until something is due; None while nothing is."""
        oldest = list(self._unproven.values())[:1]
        times = [each.deadline for each in oldest]
        if (report := self._refusals.due()) is not None:
            times.append(report)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept_waiting(self) -> None:
        for _ in range(BATCH):
            try:
                end, caller = self._socket.accept()
            except OSError as error:  # none is left, or the caller is gone again
                if error.errno in EXHAUSTED and not self._make_room():
                    time.sleep(PAUSE)
                return
            if len(self._unproven) >= PLACES:
                self._make_room()
            end.setblocking(False)
            steps = answer(self._credentials)
            deadline = time.monotonic() + HANDSHAKE
            each = Unproven(end, str(caller[0]), deadline, steps, next(steps).size)
            self._unproven[end] = each
            self._selector.register(end, selectors.EVENT_READ, partial(self._read, each))
            self._read(each)  # its first message has often come with it

    def _make_room(self) -> bool:
        """Refuse one connection; return whether there was any."""
        strangers = [each for each in self._unproven.values() if not each.introduced]
        candidates = strangers or list(self._unproven.values())
        if not candidates:
            return False
        counts = Counter(each.network for each in candidates)
        # The first of several: the oldest.
        victim = max(candidates, key=lambda each: counts[each.network])
        self._refuse(victim, "its place was needed for another one", Status.BUSY)
        return True

    def _read(self, each: Unproven) -> None:
        try:
            agreement = self._converse(each)
            wire = proven(each.end, agreement, self._silence)
        except BlockingIOError:  # until more comes
            return
        except Refused as error:
            self._refuse(each, str(error), error.status)
        except (OSError, EOFError):
            self._refuse(each, "it hung up before it had proven its key")
        else:
            self._remove(each)
            self._accept(wire, agreement.other)

    def _converse(self, each: Unproven) -> Agreement:
        """Take what has come, as far as it goes, and answer; BlockingIOError in between."""
        while True:
            content = each.end.recv(each.missing - len(each.received))
            if not content:
                raise EOFError
            each.received += content
            if len(each.received) < each.missing:
                continue
            step = each.steps.send(each.received)
            each.received, each.missing = b"", step.size
            if step.send:
                each.introduced = True
                each.end.send(step.send)  # the first bytes of this connection: there is room
            if step.agreement is not None:
                return step.agreement

    def _refuse(self, each: Unproven, reason: str, status: Status | None = None) -> None:
        self._remove(each)
        if status is not None:
            with contextlib.suppress(OSError):
                each.end.send(bytes([status]))
        each.end.close()
        self._refusals.note(each.address, reason)

    def _remove(self, each: Unproven) -> None:
        del self._unproven[each.end]
        self._selector.unregister(each.end)

    def _report(self, *, last: bool = False) -> None:
        due = self._refusals.due()
        if due is not None and (last or due <= time.monotonic()):
            self._refused(self._refusals.report(time.monotonic()))
