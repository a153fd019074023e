"""The listener: accepts callers that hold the key, and never waits for any other.

    accepted ──first message──> introduced ──proof──> authenticated
        │                           │
        └── wrong, late, or its slot is needed ──> refused

One thread serves all connections that are not authenticated yet. There are `SLOTS` for them,
and each has `HANDSHAKE_TIMEOUT` seconds. When all slots are taken, a new connection takes the
slot of the oldest connection from the network that has the most slots. Only connections that
have not introduced themselves with the key are considered, if there are any. So strangers only
compete with strangers. A caller with the key that loses its slot before its first message has
arrived gets the status BUSY, and tries again. Authenticated connections take no slot.

All refused connections are reported in one line. The line consists of the callers' addresses,
as the kernel gives them, and of fixed sentences. It contains nothing that a stranger sent.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lockstep.transport.connection import HANDSHAKE_TIMEOUT, open_frame_socket
from lockstep.transport.credentials import Credentials, Identity
from lockstep.transport.frame import FrameSocket
from lockstep.transport.handshake import Agreement, Refused, Status, Steps, answer

__all__ = ["SLOTS", "Listener", "RefusalLog"]

SLOTS = 128  # connections at a time that are not authenticated yet
BATCH = 16  # connections accepted before the others are read again
PAUSE = 0.2  # seconds to wait while no file descriptor is available
REPORT_INTERVAL = 10.0  # seconds between two reports of refused connections
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class RefusalLog:
    """Counts refused connections between two reports; times are in seconds of any clock.

    The first refusal is reported at once. Later ones are counted, and reported together
    `REPORT_INTERVAL` seconds after the last report.
    """

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._address = ""
        self._due = -math.inf

    def add(self, address: str, reason: str) -> None:
        """Count a connection from `address`; `reason` is one of a few fixed sentences."""
        self._reasons[reason] += 1
        self._address = address

    def due(self) -> float | None:
        """Return when the next report is due; None if there is nothing to report."""
        return self._due if self._reasons else None

    def report(self, now: float) -> str:
        """Return one line about all connections since the last report."""
        reasons, self._reasons = self._reasons, Counter()
        self._due = now + REPORT_INTERVAL
        if reasons.total() == 1:
            (reason,) = reasons
            return f"a connection from {self._address} was refused: {reason}"
        counts = "; ".join(f"{reason} ({count:,})" for reason, count in reasons.most_common())
        return (
            f"{reasons.total():,} connections were refused, "
            f"the last one from {self._address}: {counts}"
        )


@dataclass(eq=False)
class Pending:
    """A connection that is not authenticated yet, and the bytes received for the current step."""

    end: socket.socket
    address: str
    deadline: float
    steps: Steps
    missing: int
    received: bytes = b""
    is_introduced: bool = False

    @property
    def network(self) -> bytes:
        """The caller's IPv4 address, or its IPv6 /64 network: one caller can have all of that."""
        return ipaddress.ip_address(self.address).packed[:8]


class Listener:
    """Passes each authenticated connection to a listening socket on to `accept`.

    Args:
        listening: A socket that listens. It belongs to the listener from now on.
        credentials: The credentials of this process.
        silence: Seconds that an authenticated connection may be silent.
        accept: Called with each authenticated connection and the caller's identity.
        refused: Called with a line about refused connections, every 10 s at most.

    Both callables run on the listener's own thread, so they must not wait.
    """

    def __init__(
        self,
        listening: socket.socket,
        credentials: Credentials,
        silence: float,
        accept: Callable[[FrameSocket, Identity], None],
        refused: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._socket = listening
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._credentials, self._silence = credentials, silence
        self._accept, self._refused = accept, refused
        self._refusals = RefusalLog()
        self._pending: dict[socket.socket, Pending] = {}  # oldest first
        self._is_open = True
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept_waiting)
        self._thread = threading.Thread(target=self._serve, name="lockstep listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and refuse the connections that are not authenticated yet."""
        self._is_open = False
        self._wake.send(b"!")
        self._thread.join()
        for each in list(self._pending.values()):
            self._remove(each)
            each.end.close()
        self._report(last=True)
        for end in (self._selector, self._socket, self._wake, self._woken):
            end.close()

    # --- on the listener's thread -----------------------------------------------------------

    def _serve(self) -> None:
        while self._is_open:
            events = self._selector.select(self._timeout())
            # New connections come last: others may introduce themselves first and keep their slot.
            for key, _ in sorted(events, key=lambda event: event[0].fileobj is self._socket):
                key.data()
            for each in list(self._pending.values()):
                if each.deadline > time.monotonic():
                    break
                self._refuse(each, f"it was not authenticated within {HANDSHAKE_TIMEOUT:g} s")
            self._report()

    def _timeout(self) -> float | None:
        """Return the seconds until something is due; None if nothing is."""
        oldest = list(self._pending.values())[:1]
        times = [each.deadline for each in oldest]
        if (report := self._refusals.due()) is not None:
            times.append(report)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept_waiting(self) -> None:
        for _ in range(BATCH):
            try:
                end, caller = self._socket.accept()
            except OSError as error:  # no descriptor is available, or the caller is gone
                if error.errno in EXHAUSTED and not self._make_room():
                    time.sleep(PAUSE)
                return
            if len(self._pending) >= SLOTS:
                self._make_room()
            end.setblocking(False)
            steps = answer(self._credentials)
            deadline = time.monotonic() + HANDSHAKE_TIMEOUT
            each = Pending(end, str(caller[0]), deadline, steps, next(steps).size)
            self._pending[end] = each
            self._selector.register(end, selectors.EVENT_READ, partial(self._read, each))
            self._read(each)  # its first message has often arrived already

    def _make_room(self) -> bool:
        """Refuse one connection; return whether there was one."""
        strangers = [each for each in self._pending.values() if not each.is_introduced]
        candidates = strangers or list(self._pending.values())
        if not candidates:
            return False
        counts = Counter(each.network for each in candidates)
        # max returns the first of several: the oldest.
        victim = max(candidates, key=lambda each: counts[each.network])
        self._refuse(victim, "its slot was given to a newer connection", Status.BUSY)
        return True

    def _read(self, each: Pending) -> None:
        try:
            agreement = self._continue_handshake(each)
            frames = open_frame_socket(each.end, agreement, self._silence)
        except BlockingIOError:  # continue when more arrives
            return
        except Refused as error:
            self._refuse(each, str(error), error.status)
        except (OSError, EOFError):
            self._refuse(each, "it closed the connection before it was authenticated")
        else:
            self._remove(each)
            self._accept(frames, agreement.other)

    def _continue_handshake(self, each: Pending) -> Agreement:
        """Process what has arrived, and answer; raise BlockingIOError if more is needed."""
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
                each.is_introduced = True
                each.end.send(step.send)  # the first bytes of this connection: there is room
            if step.agreement is not None:
                return step.agreement

    def _refuse(self, each: Pending, reason: str, status: Status | None = None) -> None:
        self._remove(each)
        if status is not None:
            with contextlib.suppress(OSError):
                each.end.send(bytes([status]))
        each.end.close()
        self._refusals.add(each.address, reason)

    def _remove(self, each: Pending) -> None:
        del self._pending[each.end]
        self._selector.unregister(each.end)

    def _report(self, *, last: bool = False) -> None:
        due = self._refusals.due()
        if due is not None and (last or due <= time.monotonic()):
            self._refused(self._refusals.report(time.monotonic()))
