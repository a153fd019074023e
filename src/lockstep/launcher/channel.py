"""Messages between launcher and template: JSON with file descriptors, over a Unix socket.

    +----------------+---------------------------+
    | length, 4 byte | JSON, UTF-8, length bytes |     descriptors travel with the first byte
    +----------------+---------------------------+

Both ends run the same build of Lockstep on one host, so there is no version.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from typing import Any

__all__ = ["Channel", "Message", "adopt", "pair", "parcel", "unpack"]

Message = dict[str, Any]

LENGTH = struct.Struct("<I")
MOST_DESCRIPTORS = 8


class Channel:
    """One end of a socket; closed by `close`, and by the end of the process."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._end.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send one message; `descriptors` are duplicated into the other process.

        Raises OSError where the other end is closed.
        """
        body = json.dumps(message).encode()
        socket.send_fds(self._end, [LENGTH.pack(len(body))], list(descriptors))
        self._end.sendall(body)

    def receive(self) -> tuple[Message, list[int]] | None:
        """Wait for one message and its descriptors; None where the other end is closed."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._end, LENGTH.size, MOST_DESCRIPTORS)
            rest = self._exactly(LENGTH.size - len(head))
            body = self._exactly(LENGTH.unpack(head + rest)[0])
        except (ConnectionError, EOFError):
            return None
        return json.loads(body), list(descriptors)

    def close(self) -> None:
        """Close this end; the other then receives None."""
        self._end.close()

    def detach(self) -> int:
        """Give up the descriptor and return it."""
        return self._end.detach()

    def _exactly(self, size: int) -> bytes:
        pieces: list[bytes] = []
        while size:
            piece = self._end.recv(min(size, 1 << 20))
            if not piece:
                raise EOFError
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


def pair() -> tuple[Channel, Channel]:
    """Return two connected ends; neither is inherited by programs that are executed."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(left), Channel(right)


def adopt(descriptor: int) -> Channel:
    """Return the channel of a socket that another process passed."""
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))


def parcel(content: bytes) -> int:
    """Put `content` into an anonymous file and return its descriptor, to be passed on.

    A sender never waits for the receiver, however large the content.
    """
    descriptor = _anonymous_file()
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor


def unpack(descriptor: int) -> bytes:
    """Return the content of a parcel and close it; every receiver reads it whole."""
    with open(descriptor, "rb", buffering=0) as file:
        size, pieces, offset = os.fstat(descriptor).st_size, [], 0
        while offset < size:
            pieces.append(os.pread(file.fileno(), size - offset, offset))
            offset += len(pieces[-1])
    return b"".join(pieces)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lockstep")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
