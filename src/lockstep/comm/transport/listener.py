"""The listener: accepts callers that hold the secret, and never waits for any other.

    accepted ──first message──> introduced ──proof──> authenticated
        │                           │
        └── wrong, late, or its slot is needed ──> refused

One thread serves all connections that are not authenticated yet. There are `SLOTS` for them,
and each has `HANDSHAKE_TIMEOUT` seconds. When all slots are taken, a new connection takes the
slot of the oldest connection from the network that has the most slots. Only connections that
have not introduced themselves with the secret are considered, if there are any. So strangers only
compete with strangers. A caller with the secret that loses its slot before its first message has
arrived gets the status BUSY, and tries again. Authenticated connections take no slot.

All refused connections are reported in one line. The line consists of the callers' addresses,
as the kernel gives them, and of fixed sentences. It contains nothing that a stranger sent.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import queue
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lockstep.comm.transport.handshake import HandshakeSteps, Keys, Refused, Status, answer
from lockstep.comm.transport.message_connection import HANDSHAKE_TIMEOUT, MessageConnection

__all__ = ["SLOTS", "MessageListener", "RefusalLog"]

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
        reasons = self._reasons
        self._reasons = Counter()
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
    steps: HandshakeSteps
    missing: int
    received: bytes = b""
    is_introduced: bool = False

    @property
    def network(self) -> bytes:
        """The caller's IPv4 address, or its IPv6 /64 network: one caller can have all of that."""
        return ipaddress.ip_address(self.address).packed[:8]


class MessageListener:
    """Accepts connections from processes with the secret.

    Others cannot keep them out, and cost a fixed amount of memory.

    Args:
        listening: A socket that listens. It belongs to the listener from now on.
        secret: The secret of both ends, 32 bytes.
        purpose: What the connections are for; the same text at both ends.
        refused: Called with a line about refused connections, every 10 s at most.
        accepted: Called with each authenticated connection. By default `accept` returns them.
        max_payload: The largest payload of a message to accept, in bytes.

    Both callables run on the listener's own thread, so they must not wait.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: bytes,
        purpose: str,
        refused: Callable[[str], None] = lambda line: None,
        accepted: Callable[[MessageConnection], None] | None = None,
        max_payload: int = 0,
    ) -> None:
        self._socket = listening
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._queue: queue.SimpleQueue[MessageConnection] = queue.SimpleQueue()
        self._start_handshake = partial(answer, secret, purpose)
        self._accepted = accepted or self._queue.put
        self._refused = refused
        self._max_payload = max_payload
        self._refusals = RefusalLog()
        self._pending: dict[socket.socket, Pending] = {}  # oldest first
        self._is_open = True
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept_waiting)
        self._thread = threading.Thread(target=self._serve, name="lockstep listener", daemon=True)
        self._thread.start()

    def accept(self, timeout: float) -> MessageConnection:
        """Return the next authenticated connection.

        Raises:
            TimeoutError: None came within `timeout` seconds.
        """
        try:
            return self._queue.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise TimeoutError(f"no connection within {timeout:g} s") from None

    def close(self) -> None:
        """Stop listening, and close connections that nobody has taken."""
        self._is_open = False
        self._wake.send(b"!")
        self._thread.join()
        for pending in list(self._pending.values()):
            self._remove(pending)
            pending.end.close()
        self._report(last=True)
        for end in (self._selector, self._socket, self._wake, self._woken):
            end.close()
        while not self._queue.empty():
            self._queue.get().close()

    def __enter__(self) -> MessageListener:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the listener."""
        self.close()

    # --- on the listener's thread -----------------------------------------------------------

    def _serve(self) -> None:
        while self._is_open:
            events = self._selector.select(self._timeout())
            # New connections come last: others may introduce themselves first and keep their slot.
            for key, _ in sorted(events, key=lambda event: event[0].fileobj is self._socket):
                key.data()
            for pending in list(self._pending.values()):
                if pending.deadline > time.monotonic():
                    break
                self._refuse(pending, f"it was not authenticated within {HANDSHAKE_TIMEOUT:g} s")
            self._report()

    def _timeout(self) -> float | None:
        """Return the seconds until something is due; None if nothing is."""
        oldest = list(self._pending.values())[:1]
        times = [pending.deadline for pending in oldest]
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
            steps = self._start_handshake()
            deadline = time.monotonic() + HANDSHAKE_TIMEOUT
            pending = Pending(end, str(caller[0]), deadline, steps, next(steps).size)
            self._pending[end] = pending
            self._selector.register(end, selectors.EVENT_READ, partial(self._read, pending))
            self._read(pending)  # its first message has often arrived already

    def _make_room(self) -> bool:
        """Refuse one connection; return whether there was one."""
        strangers = [pending for pending in self._pending.values() if not pending.is_introduced]
        candidates = strangers or list(self._pending.values())
        if not candidates:
            return False
        counts = Counter(pending.network for pending in candidates)
        # max returns the first of several: the oldest.
        victim = max(candidates, key=lambda pending: counts[pending.network])
        self._refuse(victim, "its slot was given to a newer connection", Status.BUSY)
        return True

    def _read(self, pending: Pending) -> None:
        try:
            keys = self._continue_handshake(pending)
            connection = MessageConnection(pending.end, keys, self._max_payload)
        except BlockingIOError:  # continue when more arrives
            return
        except Refused as error:
            self._refuse(pending, str(error), error.status)
        except (OSError, EOFError):
            self._refuse(pending, "it closed the connection before it was authenticated")
        else:
            self._remove(pending)
            self._accepted(connection)

    def _continue_handshake(self, pending: Pending) -> Keys:
        """Process what has arrived, and answer; raise BlockingIOError if more is needed."""
        while True:
            content = pending.end.recv(pending.missing - len(pending.received))
            if not content:
                raise EOFError
            pending.received += content
            if len(pending.received) < pending.missing:
                continue
            step = pending.steps.send(pending.received)
            pending.received = b""
            pending.missing = step.size
            if step.send:
                pending.is_introduced = True
                pending.end.send(step.send)  # the first bytes of this connection: there is room
            if step.keys is not None:
                return step.keys

    def _refuse(self, pending: Pending, reason: str, status: Status | None = None) -> None:
        self._remove(pending)
        if status is not None:
            with contextlib.suppress(OSError):
                pending.end.send(bytes([status]))
        pending.end.close()
        self._refusals.add(pending.address, reason)

    def _remove(self, pending: Pending) -> None:
        del self._pending[pending.end]
        self._selector.unregister(pending.end)

    def _report(self, *, last: bool = False) -> None:
        due = self._refusals.due()
        if due is not None and (last or due <= time.monotonic()):
            self._refused(self._refusals.report(time.monotonic()))
