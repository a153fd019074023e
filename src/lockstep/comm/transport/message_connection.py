"""Authenticated connections for messages between processes that share a secret.

    with MessageListener(listen(address, port), secret, "elastic run") as listener:
        with listener.accept(timeout=10) as connection:
            request = connection.receive(timeout=5)

    with connect_to(address, port, secret, "elastic run") as connection:
        connection.send({"kind": "hello"})
        answer = connection.receive(timeout=5)

Both ends prove that they have the secret (`handshake.py`), and every message carries a proof of
its content and position (`message_codec.py`). The purpose is part of the proof: a connection for
one purpose cannot be redirected to a listener for another.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

from lockstep.comm.transport.handshake import HandshakeSteps, Keys, Refused, Status, call
from lockstep.comm.transport.message_codec import MessageCodec
from lockstep.kernel.errors import RendezvousError, UsageError

__all__ = ["HANDSHAKE_TIMEOUT", "MessageConnection", "connect_to"]

HANDSHAKE_TIMEOUT = 5.0  # seconds; the caller tries again
SEND_TIMEOUT = 10.0  # seconds for the other end to take a message
RETRY = 0.2  # seconds between two attempts
CHUNK = 1 << 20  # bytes for one system call


class MessageConnection:
    """One end of an authenticated connection; one thread may send while another receives.

    Args:
        end: The connected socket, after the handshake.
        keys: The result of the handshake.
        max_payload: The largest payload of a message to accept, in bytes.
    """

    def __init__(self, end: socket.socket, keys: Keys, max_payload: int = 0) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setblocking(False)
        self._end = end
        self._codec = MessageCodec(keys, max_payload)

    @property
    def peer(self) -> str:
        """The address of the other end, as seen from here."""
        return str(self._end.getpeername()[0])

    def fileno(self) -> int:
        """Return the descriptor of the socket, to wait until there is something to receive."""
        return self._end.fileno()

    def send(self, message: Mapping[str, Any], timeout: float = SEND_TIMEOUT) -> None:
        """Send one message.

        Raises:
            ValueError: The message is too large.
            TimeoutError: The other end took nothing for `timeout` seconds. The message may have
                been sent in part: close the connection.
            OSError: The connection broke.
        """
        for part in self._codec.encode(message):
            rest = memoryview(part)
            while rest:
                try:
                    rest = rest[self._end.send(rest[:CHUNK]) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, timeout)

    def receive(self, timeout: float | None) -> dict[str, Any]:
        """Wait for one message; None waits without limit.

        Raises:
            TimeoutError: Nothing came for `timeout` seconds. You may call `receive` again.
            EOFError: The other end closed the connection.
            ForgedMessage: The bytes are not what the other end sent next. Close the connection.
            OSError: The connection broke.
        """
        while True:
            try:
                count = self._end.recv_into(self._codec.rest)
            except BlockingIOError:
                self._wait(select.POLLIN, timeout)
                continue
            if not count:
                raise EOFError
            message = self._codec.take(count)
            if message is not None:
                return message

    def shut_down(self) -> None:
        """End the connection for both ends; threads that send or receive notice it at once."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; may be called again."""
        self._end.close()

    def __enter__(self) -> MessageConnection:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the connection."""
        self.close()

    def _wait(self, event: int, timeout: float | None) -> None:
        poll = select.poll()
        poll.register(self._end, event)
        if not poll.poll(None if timeout is None else max(0.0, timeout) * 1000):
            raise TimeoutError(f"no message within {timeout:g} s")


class _AttemptFailed(Exception):
    """An attempt that may succeed when it is repeated; the message says why it failed."""


def connect_to(
    address: str,
    port: int,
    secret: bytes,
    purpose: str,
    timeout: float = 10.0,
    *,
    called: str = "the process",
    source: str = "--secret-file",
    max_payload: int = 0,
) -> MessageConnection:
    """Connect to a `MessageListener`, trying again for `timeout` seconds.

    Args:
        address: Name or address of its host.
        port: The port at which it listens.
        secret: The secret of both ends, 32 bytes.
        purpose: What the connection is for; the same text at both ends.
        timeout: Seconds until the last attempt.
        called: What listens there, for messages.
        source: Where users set the secret, for messages.
        max_payload: The largest payload of a message to accept, in bytes.

    Raises:
        RendezvousError: Nobody answered, or it was busy or closed the connection, or a process
            that listens for another purpose answered.
        UsageError: The address is unknown, or the process there has another secret or is not
            one of this version of Lockstep.
    """
    deadline = time.monotonic() + timeout
    target = f"{called} at {address}:{port}"
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{address!r} cannot be resolved on this host") from error
    while True:
        try:
            attempt_timeout = min(HANDSHAKE_TIMEOUT, max(RETRY, deadline - time.monotonic()))
            end, keys = _attempt(address, port, call(secret, purpose), attempt_timeout)
            return MessageConnection(end, keys, max_payload)
        except Refused as error:
            if error.status is Status.MISDIRECTED:
                raise RendezvousError(f"{target} refused the connection: {error}") from error
            remedy = f": give both the same key, with {source}"
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


def _attempt(
    address: str, port: int, steps: HandshakeSteps, timeout: float
) -> tuple[socket.socket, Keys]:
    try:
        end = socket.create_connection((address, port), timeout)
    except OSError as error:
        raise _AttemptFailed((error.strerror or str(error)).lower()) from error
    with contextlib.ExitStack() as failing:
        failing.enter_context(end)
        try:
            keys = _shake_hands(end, steps, time.monotonic() + timeout)
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
    return end, keys


def _shake_hands(end: socket.socket, steps: HandshakeSteps, deadline: float) -> Keys:
    """Run the caller's end of a handshake until `deadline`, a `time.monotonic()` time."""
    step = next(steps)
    while step.keys is None:
        end.settimeout(max(0.001, deadline - time.monotonic()))
        end.sendall(step.send)
        received = b""
        while len(received) < step.size:
            end.settimeout(max(0.001, deadline - time.monotonic()))
            content = end.recv(step.size - len(received))
            if not content:
                raise EOFError
            received += content
        step = steps.send(received)
    return step.keys
