"""The messages of an authenticated connection as bytes; every part carries its own proof.

    ┌───────────────────────┬───────────┐   ┌─────────┬─────────────┬───────────┐
    │ sizes of both, 4 + 8  │ proof, 32 │   │ message │ its payload │ proof, 32 │
    └───────────────────────┴───────────┘   └─────────┴─────────────┴───────────┘
    proof of a part    HMAC(key, kind of part, number of the message, content of the part)

A message is a JSON object. Between a driver and its workers it may have a payload, raw bytes
under the key "payload": a pickle.

The key belongs to one direction of one connection (`handshake.py`), and both ends count
messages. A proof is therefore valid in exactly one place: nothing can be changed, exchanged,
reordered, repeated or left out undetected. A connection can be cut at any point, which always
counts as a lost connection, never as the end of a message. No memory is allocated for a message
before the proof of its sizes and the limits have been checked, and nothing is parsed, or returned
to be unpickled, before its own proof.

Nothing is encrypted: anyone who can listen on the network can read the messages. The codec does
no input or output.
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Mapping
from typing import Any

from lockstep.comm.transport.handshake import Keys

__all__ = ["MAX_MESSAGE", "ForgedMessage", "MessageCodec"]

SIZES = struct.Struct("<IQ")
PART = struct.Struct("<BQ")  # kind of part, number of the message
SIZES_PART, CONTENT_PART = range(2)
PROOF = 32  # bytes
MAX_MESSAGE = 1 << 20  # bytes of JSON


class ForgedMessage(Exception):
    """Bytes that the other end of this connection did not send, or not at this point."""


class MessageCodec:
    """One end of a connection: encodes messages to send, decodes bytes that were received.

    Attributes:
        rest: Memory for the bytes to receive next: the rest of one part of a message.

    Args:
        keys: The keys of this end.
        max_payload: The largest payload to accept, in bytes.
        max_message: The largest message to send or to accept, in bytes of JSON.
    """

    def __init__(self, keys: Keys, max_payload: int = 0, max_message: int = MAX_MESSAGE) -> None:
        self._sending, self._receiving = keys
        self._limits = max_message, max_payload
        self._sent = 0
        self._received = 0
        self._sizes: tuple[int, int] | None = None  # of the message that comes next
        self.rest = _allocate(SIZES.size)
        self._part = self.rest

    def encode(self, message: Mapping[str, Any]) -> list[bytes | memoryview]:
        """Return the bytes of the next message to send; ValueError if it is too large."""
        payload = message.get("payload", b"")
        text = json.dumps({k: v for k, v in message.items() if k != "payload"}, ensure_ascii=False)
        content = text.encode(errors="surrogatepass")  # json.loads reads it in the same way
        if len(content) > self._limits[0]:
            raise ValueError(f"a message has {len(content):,} bytes, more than {self._limits[0]:,}")
        number = self._sent
        self._sent += 1
        sizes = SIZES.pack(len(content), len(payload))
        proof = prove(self._sending, SIZES_PART, number, sizes)
        return [
            sizes + proof + content,
            payload,
            prove(self._sending, CONTENT_PART, number, content, payload),
        ]

    def take(self, count: int) -> dict[str, Any] | None:
        """Return the message that is complete after `count` bytes were written into `rest`, if any.

        Raises:
            ForgedMessage: The bytes are not what the other end sent next, or too many, or not a
                JSON object. Close the connection.
        """
        self.rest = self.rest[count:]
        if self.rest:
            return None
        content = self._part[:-PROOF]
        proof = self._part[-PROOF:]
        kind = SIZES_PART if self._sizes is None else CONTENT_PART
        if not hmac.compare_digest(proof, prove(self._receiving, kind, self._received, content)):
            raise ForgedMessage("a message without its proof")
        if self._sizes is None:
            self._sizes = SIZES.unpack(content)
            if any(size > limit for size, limit in zip(self._sizes, self._limits, strict=True)):
                raise ForgedMessage(f"a message of {sum(self._sizes):,} bytes")
            self.rest = _allocate(sum(self._sizes))
            self._part = self.rest
            return None
        size = self._sizes[0]
        self._sizes = None
        self._received += 1
        self.rest = _allocate(SIZES.size)
        self._part = self.rest
        return _parse(content[:size], content[size:])


def prove(key: bytes, kind: int, number: int, *content: bytes | memoryview) -> bytes:
    """Return the proof of one part of message `number`."""
    proof = hmac.new(key, PART.pack(kind, number), "sha256")
    for piece in content:
        proof.update(piece)
    return proof.digest()


def _allocate(size: int) -> memoryview:
    return memoryview(bytearray(size + PROOF))


def _parse(content: memoryview, payload: memoryview) -> dict[str, Any]:
    try:
        message = json.loads(bytes(content))
    except (ValueError, RecursionError) as error:
        raise ForgedMessage("a message that is not JSON") from error
    if not isinstance(message, dict):
        raise ForgedMessage("a message that is not a JSON object")
    return {**message, "payload": payload} if payload else message
