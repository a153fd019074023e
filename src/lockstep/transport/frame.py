"""Frames: messages on an authenticated connection; every part of one carries its own proof.

    ┌───────────┬───────────┬──────────────┬───────────┐   ┌────────────┬───────────┐
    │ length, 4 │ proof, 32 │ header, JSON │ proof, 32 │ + │ pieces ... │ proof, 32 │
    └───────────┴───────────┴──────────────┴───────────┘   └────────────┴───────────┘
                                                            if the header lists sizes
    proof of the length    HMAC(key, place(LENGTH, n, 0, 4), length)
    proof of the header    HMAC(key, place(HEADER, n, 0, size), header)
    proof of the pieces    HMAC(key, place(PIECE, n, 0, size), piece 0,
                                     place(PIECE, n, 1, size), piece 1, ...)

`place` packs the kind of part, the frame's number `n`, the piece's index and the size
in bytes into a fixed number of bytes, and the key belongs to one direction of one
connection (`handshake.py`). A proof is therefore valid in exactly one place: nothing can be
changed, exchanged, reordered, repeated or left out undetected. A connection can be cut at
any point, which always counts as a lost connection, never as the end of a message.

Both ends count frames; the number is not sent. The length is checked before memory is
allocated for the header, and the header, which lists the sizes of the pieces, before memory
is allocated for them. Nothing is parsed, or returned to be unpickled, before all of it is
checked. Pieces are raw bytes: a pickle, and the tensors that it refers to, which are sent
from their own memory and received into the memory of the new tensors.

Nothing is encrypted: anyone who can listen on the network can read the frames.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "HEADER_PART",
    "LENGTH",
    "LENGTH_PART",
    "PROOF",
    "Buffer",
    "ForgedFrame",
    "Frame",
    "FrameSocket",
    "check_proof",
    "decode_length",
    "encode_header",
    "prove",
    "receive_exactly",
]

Buffer = memoryview

LENGTH = struct.Struct("<I")
PLACE = struct.Struct("<BQQQ")  # kind of part, number of the frame, index of the piece, size
LENGTH_PART, HEADER_PART, PIECE_PART = range(3)
PROOF = 32  # bytes
MAX_HEADER = 1 << 24  # bytes
MAX_PIECES = 1 << 40  # bytes of one frame's pieces
CHUNK = 1 << 20  # bytes for one system call
ALIGNMENT = 64  # bytes: kernels may choose their path by the alignment of a tensor


class ForgedFrame(Exception):
    """A frame that the other end of this connection did not send, or not at this point."""


@dataclass(frozen=True)
class Frame:
    """One message: a JSON header with its "kind", and raw pieces."""

    header: dict[str, Any]
    pieces: Sequence[Buffer] = field(default=())

    @property
    def kind(self) -> str:
        """The kind of message."""
        return str(self.header["kind"])


class FrameSocket:
    """One end of an authenticated connection; one thread may send while another receives.

    `send` and `receive` raise OSError if the connection broke, and TimeoutError (an OSError)
    if the other end was too slow.

    Args:
        end: The connected socket. Its timeout is the longest time to wait for the next
            bytes, and for each MiB of them.
        sending: Key of the frames that this end sends.
        receiving: Key of the frames that this end receives; differs from `sending`.
    """

    def __init__(self, end: socket.socket, sending: bytes, receiving: bytes) -> None:
        self.end = end
        self.sending, self.receiving = sending, receiving
        self._sent = self._received = 0

    def send(self, frame: Frame) -> None:
        """Send one frame."""
        sizes = [piece.nbytes for piece in frame.pieces]
        header = json.dumps({**frame.header, "sizes": sizes}).encode()
        key, number = self.sending, self._sent
        self._sent += 1
        self._send_all(encode_header(key, number, header))
        if sizes:
            proof = hmac.new(key, digestmod="sha256")
            for index, piece in enumerate(frame.pieces):
                proof.update(PLACE.pack(PIECE_PART, number, index, piece.nbytes))
                proof.update(piece)
                self._send_all(piece)
            self._send_all(proof.digest())

    def receive(self) -> Frame:
        """Wait for one frame.

        Raises:
            EOFError: The connection was closed.
            ForgedFrame: The bytes are not what the other end sent next.
        """
        key, number = self.receiving, self._received
        self._received += 1
        size = decode_length(key, number, receive_exactly(self.end, LENGTH.size + PROOF))
        if size > MAX_HEADER:
            raise ForgedFrame(f"a header of {size} bytes")
        rest = receive_exactly(self.end, size + PROOF)
        text, proof = rest[:size], rest[size:]
        check_proof(proof, prove(key, HEADER_PART, number, text), "header")
        header = json.loads(bytes(text))
        sizes = header.pop("sizes")
        if sum(sizes) > MAX_PIECES:
            raise ForgedFrame(f"a frame of {sum(sizes)} bytes")
        return Frame(header, self._receive_pieces(number, sizes) if sizes else ())

    def _receive_pieces(self, number: int, sizes: Sequence[int]) -> list[Buffer]:
        pieces = [receive_exactly(self.end, size, is_aligned=True) for size in sizes]
        proof = hmac.new(self.receiving, digestmod="sha256")
        for index, piece in enumerate(pieces):
            proof.update(PLACE.pack(PIECE_PART, number, index, piece.nbytes))
            proof.update(piece)
        check_proof(receive_exactly(self.end, PROOF), proof.digest(), "piece")
        return pieces

    def _send_all(self, content: bytes | Buffer) -> None:
        # Not sendall: its timeout applies to the whole, regardless of the size.
        view = memoryview(content).cast("B")
        while view:
            view = view[self.end.send(view[:CHUNK]) :]


def encode_header(key: bytes, number: int, header: bytes) -> bytes:
    """Return the first bytes of frame `number`: its length and its header, each with its proof."""
    length = LENGTH.pack(len(header))
    proofs = prove(key, LENGTH_PART, number, length), prove(key, HEADER_PART, number, header)
    return length + proofs[0] + header + proofs[1]


def decode_length(key: bytes, number: int, start: bytes | Buffer) -> int:
    """Return the length of a frame's header from the length and its proof.

    Raises:
        ForgedFrame: The proof is wrong.
    """
    length, proof = start[: LENGTH.size], start[LENGTH.size :]
    check_proof(proof, prove(key, LENGTH_PART, number, length), "length")
    return int(LENGTH.unpack(length)[0])


def prove(key: bytes, part: int, number: int, content: bytes | Buffer) -> bytes:
    """Return the proof of one part of frame `number`."""
    place = PLACE.pack(part, number, 0, len(content))
    return hmac.digest(key, place + bytes(content), "sha256")


def check_proof(proof: bytes | Buffer, expected: bytes, part: str) -> None:
    """Raise ForgedFrame unless `proof` is the expected one."""
    if not hmac.compare_digest(proof, expected):
        raise ForgedFrame(f"a {part} without its proof")


def _allocate_aligned(size: int) -> Buffer:
    import numpy  # imported here: most processes receive no tensors

    memory = numpy.empty(size + ALIGNMENT, numpy.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory.data[start : start + size]


def receive_exactly(end: socket.socket, size: int, *, is_aligned: bool = False) -> Buffer:
    """Receive `size` bytes into new memory, which begins on a 64-byte boundary if `is_aligned`.

    Raises:
        EOFError: The connection was closed before.
        TimeoutError: No byte came within the socket's timeout, or less than one MiB per
            timeout, so that an end that sends single bytes cannot block this one forever.
    """
    timeout, started = end.gettimeout(), time.monotonic()
    view = whole = _allocate_aligned(size) if is_aligned else memoryview(bytearray(size))
    while view:
        count = end.recv_into(view[:CHUNK])
        if not count:
            raise EOFError
        view = view[count:]
        waited = time.monotonic() - started
        if view and timeout is not None and waited > timeout * (1 + size // CHUNK):
            raise TimeoutError
    return whole
