"""The messages of an authenticated connection as bytes: JSON objects, in frames without pieces.

The codec does no input or output: a blocking connection (`message_connection.py`) and a server
of many connections (`launcher/store_server.py`) use it. Content is parsed after its proof has been
checked. No memory is allocated for a length before its proof and the limit have been checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.transport.frame import (
    HEADER_PART,
    LENGTH,
    PROOF,
    ForgedFrame,
    check_proof,
    decode_length,
    encode_header,
    prove,
)

__all__ = ["MAX_MESSAGE", "MessageCodec"]

MAX_MESSAGE = 1 << 20  # bytes of JSON


class MessageCodec:
    """One end of a connection: encodes messages to send, decodes bytes that were received.

    Args:
        sending: Key of the messages that this end sends.
        receiving: Key of the messages that this end receives; differs from `sending`.
        max_message: The largest message to send or to accept, in bytes of JSON.
    """

    def __init__(self, sending: bytes, receiving: bytes, max_message: int = MAX_MESSAGE) -> None:
        self._sending, self._receiving, self._max_message = sending, receiving, max_message
        self._sent = self._received = 0
        self._buffer = bytearray()
        self._size: int | None = None  # of the message whose length has been proven

    def encode(self, message: Mapping[str, Any]) -> bytes:
        """Return the bytes of the next message to send; ValueError if it is too large."""
        content = json.dumps(message).encode()
        if len(content) > self._max_message:
            raise ValueError(
                f"a message has {len(content):,} bytes, more than {self._max_message:,}"
            )
        number = self._sent
        self._sent += 1
        return encode_header(self._sending, number, content)

    @property
    def missing(self) -> int:
        """How many bytes to receive next, at least 1: at most the rest of one message."""
        return self._next_size - len(self._buffer)

    def decode(self, content: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that `content`, the next received bytes, completes.

        Raises:
            ForgedFrame: The bytes are not what the other end sent next, or too many, or not a
                JSON object. Close the connection.
        """
        self._buffer += content
        while len(self._buffer) >= (size := self._next_size):
            part = bytes(self._buffer[:size])
            del self._buffer[:size]
            if self._size is None:
                self._size = self._check_length(part)
            else:
                yield self._parse(part)

    @property
    def _next_size(self) -> int:
        return (LENGTH.size if self._size is None else self._size) + PROOF

    def _check_length(self, part: bytes) -> int:
        size = decode_length(self._receiving, self._received, part)
        if size > self._max_message:
            raise ForgedFrame(f"a message of {size:,} bytes")
        return size

    def _parse(self, part: bytes) -> dict[str, Any]:
        content, proof = part[:-PROOF], part[-PROOF:]
        check_proof(proof, prove(self._receiving, HEADER_PART, self._received, content), "message")
        self._size, self._received = None, self._received + 1
        try:
            message = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ForgedFrame("a message that is not JSON") from error
        if not isinstance(message, dict):
            raise ForgedFrame("a message that is not a JSON object")
        return message
