"""Connections between a driver, its node agents and its workers.

`connect` opens one and proves who this process is. A `Connection` has one thread that sends
and one that receives:

    post ──> queue ──> sender ═══ frames, or a heartbeat each second ═══> the other end
    on_frame <──────── receiver <══════════════════════════════════════

`post` never waits, so neither Ctrl-C nor a garbage collection can leave half a frame behind.
An end that is silent for longer than the socket's timeout counts as lost, like one that
closed the connection.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable

from lockstep.errors import RendezvousError, UsageError
from lockstep.launcher.listening_socket import resolve_address
from lockstep.remote.credentials import KEY_VARIABLE, Credentials, Identity
from lockstep.remote.frame import ForgedFrame, Frame, FrameSocket, receive_exactly
from lockstep.remote.handshake import Agreement, Refused, Status, Steps, call

__all__ = ["HANDSHAKE_TIMEOUT", "Connection", "connect", "open_frame_socket"]

HANDSHAKE_TIMEOUT = 5.0  # seconds; the caller tries again
RETRY = 0.2  # seconds between two attempts
HEARTBEAT = Frame({"kind": "heartbeat"})
HEARTBEAT_INTERVAL = 1.0  # seconds
CLOSE_TIMEOUT = 5.0  # seconds for frames that were posted before `close`


class _AttemptFailed(Exception):
    """An attempt that may succeed when it is repeated; the message says why it failed."""


def connect(
    address: str,
    port: int,
    credentials: Credentials,
    called: Identity,
    silence: float,
    timeout: float = 10.0,
) -> FrameSocket:
    """Connect to `called`, trying again for `timeout` seconds.

    Args:
        address: Name or address of its host.
        port: The port at which it listens.
        credentials: The credentials of this process.
        called: The process that must answer; any other one is refused.
        silence: Seconds of silence after which the open connection counts as lost.
        timeout: Seconds until the last attempt.

    Raises:
        RendezvousError: It did not answer, was busy or closed the connection, or another
            process of Lockstep answered.
        UsageError: The address is unknown, or the process that listens there has another key or
            does not belong to this version of Lockstep.
    """
    deadline = time.monotonic() + timeout
    target = f"{called} at {address}:{port}"
    try:
        resolve_address(address)
    except UsageError as error:
        raise UsageError(f"{address!r} cannot be resolved on this host") from error
    while True:
        try:
            attempt_timeout = min(HANDSHAKE_TIMEOUT, max(RETRY, deadline - time.monotonic()))
            return _attempt(address, port, call(credentials, called), attempt_timeout, silence)
        except Refused as error:
            if error.status is Status.MISDIRECTED:
                raise RendezvousError(f"{target} refused the connection: {error}") from error
            remedy = f": give both the same key, with a key file or {KEY_VARIABLE}"
            raise UsageError(
                f"{target} refused the connection: {error}"
                f"{remedy if error.status is Status.OTHER_KEY else ''}"
            ) from error
        except _AttemptFailed as error:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"{target} could not be reached within {timeout:g} s: {error}"
                ) from error
            time.sleep(RETRY)


def open_frame_socket(end: socket.socket, agreement: Agreement, silence: float) -> FrameSocket:
    """Return the frame socket of a connection on which the handshake is complete."""
    end.settimeout(silence)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return FrameSocket(end, agreement.sending, agreement.receiving)


def _attempt(address: str, port: int, steps: Steps, timeout: float, silence: float) -> FrameSocket:
    try:
        end = socket.create_connection((address, port), timeout)
    except OSError as error:
        raise _AttemptFailed((error.strerror or str(error)).lower()) from error
    with contextlib.ExitStack() as failing:
        failing.enter_context(end)
        try:
            agreement = _shake_hands(end, steps, time.monotonic() + timeout)
            frames = open_frame_socket(end, agreement, silence)
        except TimeoutError as error:
            raise _AttemptFailed("it accepts connections but does not answer") from error
        except (OSError, EOFError) as error:
            raise _AttemptFailed(
                "it closes connections before the handshake is complete; it is shutting down, or "
                "is not a process of this version of Lockstep"
            ) from error
        except Refused as error:
            if error.status is Status.BUSY:
                raise _AttemptFailed(
                    f"{error}; check on its host which processes connect to that port"
                ) from error
            raise
        failing.pop_all()
    return frames


def _shake_hands(end: socket.socket, steps: Steps, deadline: float) -> Agreement:
    step = next(steps)
    while step.agreement is None:
        end.settimeout(max(0.001, deadline - time.monotonic()))
        end.sendall(step.send)
        step = steps.send(bytes(receive_exactly(end, step.size)))
    return step.agreement


class Connection:
    """Sends and receives frames on its own threads, from `start` to `close`.

    Args:
        frames: The authenticated connection.
        on_frame: Called with each frame, on the receiving thread.
        on_lost: Called once with the reason if the other end is lost, on the receiving thread.
    """

    def __init__(
        self,
        frames: FrameSocket,
        on_frame: Callable[[Connection, Frame], None],
        on_lost: Callable[[Connection, str], None],
    ) -> None:
        self._frames = frames
        self._on_frame, self._on_lost = on_frame, on_lost
        self._posted: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=target, name=f"lockstep {target.__name__}", daemon=True)
            for target in (self._send, self._receive)
        ]

    @property
    def peer(self) -> str:
        """The address of the other end, as seen from here."""
        return str(self._frames.end.getpeername()[0])

    def start(self) -> Connection:
        """Start both threads."""
        for thread in self._threads:
            thread.start()
        return self

    def post(self, frame: Frame) -> None:
        """Queue a frame to be sent; safe on any thread and in a destructor."""
        self._posted.put(frame)

    def close(self) -> None:
        """Send what was posted, end both threads and close the connection."""
        self._is_closed = True
        self._posted.put(None)
        sender, receiver = self._threads
        if sender is not threading.current_thread():
            sender.join(CLOSE_TIMEOUT)
        self._shut_down()
        for thread in (sender, receiver):
            if thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT)
        self._frames.end.close()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the receiver sees it too, and reports it
            while True:
                try:
                    frame = self._posted.get(timeout=HEARTBEAT_INTERVAL)
                except queue.Empty:
                    frame = HEARTBEAT
                if frame is None:
                    return
                self._frames.send(frame)
        self._shut_down()

    def _receive(self) -> None:
        reason = self._receive_all()
        self._shut_down()
        if not self._is_closed:
            self._on_lost(self, reason)

    def _receive_all(self) -> str:
        """Receive frames until the connection is lost; return the reason."""
        try:
            while True:
                frame = self._frames.receive()
                if frame.kind != "heartbeat":
                    self._on_frame(self, frame)
        except (EOFError, ConnectionError):
            return "closed the connection"
        except TimeoutError:
            return f"was silent for {self._frames.end.gettimeout():g} s"
        except ForgedFrame as error:
            return f"sent {error}, so the connection was closed"
        except OSError as error:
            return f"lost its connection ({error.strerror or error})"
        except Exception as error:  # a bug, or another version of Lockstep
            return f"sent a message that cannot be processed ({type(error).__name__}: {error})"

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._frames.end.shutdown(socket.SHUT_RDWR)
