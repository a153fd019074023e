"""Messages between launcher and fork server: JSON with file descriptors, over a Unix socket.

    +-----------------+---------------------------+
    | length, 4 bytes | JSON, UTF-8, length bytes |     descriptors travel with the first byte
    +-----------------+---------------------------+

Both ends run the same build of Lockstep on one host, so the format has no version.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from typing import Any

__all__ = ["Channel", "Message", "open_channel", "open_pair", "read_memfd", "write_memfd"]

Message = dict[str, Any]

LENGTH = struct.Struct("<I")
MAX_DESCRIPTORS = 8


class Channel:
    """One end of a socket; closed by `close` and by the end of the process."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._end.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send one message; `descriptors` are duplicated into the other process.

        Raises:
            OSError: The other end is closed.
        """
        body = json.dumps(message).encode()
        content = LENGTH.pack(len(body)) + body
        # One system call, so that an exception raised by a signal handler (Ctrl-C) comes before
        # the message or after it: the other end would take a partial message for the beginning
        # of the next one.
        sent = socket.send_fds(self._end, [content], list(descriptors))
        if sent == len(content):
            return
        try:
            self._end.sendall(content[sent:])  # the message is larger than the buffer
        except BaseException:
            with contextlib.suppress(OSError):
                self._end.shutdown(socket.SHUT_WR)  # nothing may follow a partial message
            raise

    def receive(self) -> tuple[Message, list[int]] | None:
        """Wait for one message and its descriptors, which executed programs do not inherit.

        Returns:
            None if the other end is closed, or if `stop_waiting` was called and nothing is left.
        """
        try:
            head, descriptors, _, _ = socket.recv_fds(self._end, LENGTH.size, MAX_DESCRIPTORS)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            rest = self._receive_exactly(LENGTH.size - len(head))
            body = self._receive_exactly(LENGTH.unpack(head + rest)[0])
        except (ConnectionError, EOFError, BlockingIOError):
            return None
        return json.loads(body), list(descriptors)

    def stop_waiting(self) -> None:
        """Let `receive` return what has been sent, and then None.

        For a process that has exited: a process that it has forked may hold the other end.
        """
        self._end.setblocking(False)

    def close(self) -> None:
        """Close this end; the other then receives None."""
        self._end.close()

    def detach(self) -> int:
        """Return the descriptor, which this object no longer owns."""
        return self._end.detach()

    def _receive_exactly(self, size: int) -> bytes:
        pieces: list[bytes] = []
        while size:
            piece = self._end.recv(min(size, 1 << 20))
            if not piece:
                raise EOFError
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


def open_pair() -> tuple[Channel, Channel]:
    """Return two connected channels; executed programs inherit neither."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(left), Channel(right)


def open_channel(descriptor: int) -> Channel:
    """Return the channel of a socket that another process passed."""
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))


def write_memfd(content: bytes) -> int:
    """Write `content` to an anonymous file and return its descriptor, to send to another process.

    The sender never waits for the receiver, regardless of the size.
    """
    descriptor = _create_anonymous_file()
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor


def read_memfd(descriptor: int) -> bytes:
    """Return the whole content of an anonymous file and close the descriptor."""
    with open(descriptor, "rb", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        pieces = []
        offset = 0
        while offset < size:
            # pread: the receivers share one file position.
            pieces.append(os.pread(file.fileno(), size - offset, offset))
            offset += len(pieces[-1])
    return b"".join(pieces)


def _create_anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lockstep")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
