"""Authenticated connections for messages between processes that share a secret.

    with MessageListener(listen(address, port), secret, "check of hosts") as listener:
        with listener.accept(timeout=10) as connection:
            request = connection.receive(timeout=5)

    with connect_to(address, port, secret, "check of hosts") as connection:
        connection.send({"kind": "hello"})
        answer = connection.receive(timeout=5)

Messages are JSON objects of at most 1 MiB. Both ends prove that they have the secret
(`handshake.py`), and every message carries a proof of its content and position (`frame.py`).
Nothing is encrypted. The purpose is part of the proof: a connection for one purpose cannot be
redirected to a listener for another.
"""

from __future__ import annotations

import hashlib
import queue
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.transport.connection import connect
from lockstep.transport.credentials import SESSION, Credentials, Identity, Role
from lockstep.transport.frame import FrameSocket
from lockstep.transport.listener import Listener
from lockstep.transport.message_codec import MAX_MESSAGE, MessageCodec

__all__ = ["MessageConnection", "MessageListener", "connect_to", "derive_credentials"]

SEND_TIMEOUT = 10.0  # seconds for the other end to take a message
CHUNK = 1 << 16  # bytes


def derive_credentials(secret: bytes, purpose: str, source: str = "--secret-file") -> Credentials:
    """Return the credentials of both ends of connections for `purpose`."""
    session = hashlib.sha256(purpose.encode()).digest()[:SESSION]
    return Credentials(secret, Identity(Role.PEER), session, source)


class MessageConnection:
    """One end of an authenticated connection; use it on one thread at a time.

    Args:
        frames: The connection on which the handshake is complete.
        max_message: The largest message to send or to accept, in bytes of JSON.
    """

    def __init__(self, frames: FrameSocket, max_message: int = MAX_MESSAGE) -> None:
        self._end = frames.end
        self._codec = MessageCodec(frames.sending, frames.receiving, max_message)
        self._received: list[dict[str, Any]] = []

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
            TimeoutError: The other end did not take it within `timeout` seconds. The message
                may have been sent in part: close the connection.
            OSError: The connection broke.
        """
        self._end.settimeout(timeout)
        self._end.sendall(self._codec.encode(message))

    def receive(self, timeout: float) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            TimeoutError: No complete message came within `timeout` seconds. You may call
                `receive` again.
            EOFError: The other end closed the connection.
            ForgedFrame: The bytes are not what the other end sent next. Close the connection.
            OSError: The connection broke.
        """
        deadline = time.monotonic() + timeout
        self._end.settimeout(0)
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        while not self._received:
            left = deadline - time.monotonic()
            if not poll.poll(max(0.0, left) * 1000):
                raise TimeoutError(f"no message within {timeout:g} s")
            content = self._end.recv(min(self._codec.missing, CHUNK))
            if not content:
                raise EOFError
            self._received += self._codec.decode(content)
        return self._received.pop(0)

    def close(self) -> None:
        """Close the connection; may be called again."""
        self._end.close()

    def __enter__(self) -> MessageConnection:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the connection."""
        self.close()


def connect_to(
    address: str, port: int, secret: bytes, purpose: str, timeout: float = 10.0
) -> MessageConnection:
    """Connect to a `MessageListener`, trying again for `timeout` seconds.

    Args:
        address: Name or address of its host.
        port: The port at which it listens.
        secret: The secret of both ends, 32 bytes.
        purpose: What the connection is for; the same text at both ends.
        timeout: Seconds until the last attempt.

    Raises:
        RendezvousError: Nobody answered, or a process that listens for another purpose did.
        UsageError: The address is unknown, or the process there has another secret or is not
            one of this version of Lockstep.
    """
    own = derive_credentials(secret, purpose)
    return MessageConnection(connect(address, port, own, own.own, SEND_TIMEOUT, timeout))


class MessageListener:
    """Accepts connections from processes with the secret.

    Others cannot keep them out, and cost a fixed amount of memory (`listener.py`).

    Args:
        listening: A socket that listens. It belongs to the listener from now on.
        secret: The secret of both ends, 32 bytes.
        purpose: What the connections are for; the same text at both ends.
        refused: Called with a line about refused connections, every 10 s at most, on another
            thread.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: bytes,
        purpose: str,
        refused: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._accepted: queue.SimpleQueue[MessageConnection] = queue.SimpleQueue()
        credentials = derive_credentials(secret, purpose)
        self._listener = Listener(listening, credentials, SEND_TIMEOUT, self._accept, refused)
        self.port = self._listener.port

    def _accept(self, frames: FrameSocket, caller: Identity) -> None:
        self._accepted.put(MessageConnection(frames))

    def accept(self, timeout: float) -> MessageConnection:
        """Return the next authenticated connection.

        Raises:
            TimeoutError: None came within `timeout` seconds.
        """
        try:
            return self._accepted.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise TimeoutError(f"no connection within {timeout:g} s") from None

    def close(self) -> None:
        """Stop listening, and close connections that were not taken with `accept`."""
        self._listener.close()
        while not self._accepted.empty():
            self._accepted.get().close()

    def __enter__(self) -> MessageListener:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the listener."""
        self.close()
