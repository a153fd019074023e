"""Frames: what is sent over one connection, each with a number and a proof of its origin.

    +-----------+--------------------+----------------+--------------------------+
    | length, 4 | proof of header 32 | header, JSON   | pieces ... | their proof |
    +-----------+--------------------+----------------+--------------------------+

The proof is an HMAC under the connection's key for this direction, over the
frame's number too, which both ends count: a frame that is changed, repeated,
left out or put in is noticed. The header gives the sizes of the pieces, so no
memory is taken before it is proven. Pieces are raw bytes: a pickle, and the
tensors that it speaks of, which are sent from and received into their own memory.

Nothing is hidden: who can listen on the network can read along.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

__all__ = ["Buffer", "Forged", "Frame", "Wire", "exactly"]

Buffer = memoryview

LENGTH = struct.Struct("<I")
NUMBER = struct.Struct("<Q")
PROOF = 32  # bytes
LONGEST_HEADER = 1 << 24
LARGEST = 1 << 40  # bytes of one frame's pieces
CHUNK = 1 << 20  # bytes for one system call
ALIGNMENT = 64  # bytes: kernels choose their path by where a tensor begins


class Forged(Exception):
    """A frame that this connection's other end did not send, or not now."""


@dataclass(frozen=True)
class Frame:
    """One message: a JSON header, whose "kind" says what it is, and raw pieces."""

    header: dict[str, Any]
    pieces: Sequence[Buffer] = field(default=())

    @property
    def kind(self) -> str:
        """What kind of message it is."""
        return str(self.header["kind"])


class Wire:
    """One end of a proven connection; one thread may send while another receives.

    Both raise OSError where the connection broke, TimeoutError (an OSError) where
    the socket's own deadline passed without a byte.
    """

    def __init__(self, end: socket.socket, sending: bytes, receiving: bytes) -> None:
        self.end = end
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0

    def send(self, frame: Frame) -> None:
        """Send one frame."""
        sizes = [piece.nbytes for piece in frame.pieces]
        header = json.dumps({**frame.header, "sizes": sizes}).encode()
        number = NUMBER.pack(self._sent)
        self._sent += 1
        proof = hmac.digest(self._sending, number + header, "sha256")
        self._put(LENGTH.pack(len(header)) + proof + header)
        if not sizes:
            return
        rest = hmac.new(self._sending, number, "sha256")
        for piece in frame.pieces:
            rest.update(piece)
            self._put(piece)
        self._put(rest.digest())

    def receive(self) -> Frame:
        """Wait for one frame; EOFError at the end, Forged for what is none of the other end's."""
        (length,) = LENGTH.unpack(exactly(self.end, LENGTH.size))
        if length > LONGEST_HEADER:
            raise Forged(f"a header of {length} bytes")
        number = NUMBER.pack(self._received)
        self._received += 1
        proof = exactly(self.end, PROOF)
        text = exactly(self.end, length)
        if not hmac.compare_digest(
            proof, hmac.digest(self._receiving, number + bytes(text), "sha256")
        ):
            raise Forged("a header without its proof")
        header = json.loads(bytes(text))
        sizes = header.pop("sizes")
        if sum(sizes) > LARGEST:
            raise Forged(f"a frame of {sum(sizes)} bytes")
        return Frame(header, self._pieces(number, sizes) if sizes else ())

    def _pieces(self, number: bytes, sizes: Sequence[int]) -> list[Buffer]:
        rest = hmac.new(self._receiving, number, "sha256")
        pieces = [exactly(self.end, size) for size in sizes]
        for piece in pieces:
            rest.update(piece)
        if not hmac.compare_digest(exactly(self.end, PROOF), rest.digest()):
            raise Forged("a piece without its proof")
        return pieces

    def _put(self, content: bytes | Buffer) -> None:
        # Not sendall: its deadline is for the whole, however much that is.
        view = memoryview(content).cast("B")
        while view:
            view = view[self.end.send(view[:CHUNK]) :]


def exactly(end: socket.socket, size: int) -> Buffer:
    """Receive `size` bytes into memory of their own, which begins on a 64-byte boundary."""
    memory = numpy.empty(size + ALIGNMENT, numpy.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    view = whole = memory.data[start : start + size]
    while view:
        count = end.recv_into(view[:CHUNK])
        if not count:
            raise EOFError
        view = view[count:]
    return whole
