"""The handshake: both ends prove that they hold the secret, and agree on their purpose.

    caller                                                                   listener
      ── greeting, purpose, nonce C, introduction ─────────────────────────────>
      <─ status, nonce L ───────────────────────────────────────────────────────
      ── proof of the caller ──────────────────────────────────────────────────>
      <─ status, proof of the listener ─────────────────────────────────────────
      ══ messages (message_codec.py), with one key for each direction ══════════

    introduction  HMAC(secret, "introduction", greeting ... nonce C)
    session       HMAC(secret, "connection", all of the first message, nonce L)
    proofs, keys  HMAC(session, label), with a label for each of the four

HMAC is HMAC-SHA-256. The session key covers everything that was sent: the purpose and both
nonces. So a connection fails if it is redirected to a listener for another purpose, reflected,
or composed of recorded ones. The address of the listener is not covered, because an SSH tunnel
changes it.

The introduction comes first, so that a listener can tell callers with the secret from strangers
by their first message (`listener.py`). It could be recorded, so it proves nothing else: messages
are accepted only after the proof, which covers nonce L.

Every message has a fixed length, so a stranger cannot make this process allocate memory. A
stranger learns that Lockstep listens here, and why it is refused. The status is not
authenticated: it says why the other end closed the connection, and affects only the error
message and whether the caller tries again.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["HandshakeSteps", "Keys", "Refused", "Status", "Step", "answer", "call"]

GREETING = b"lockstep secret 4\n"
NONCE = PROOF = PURPOSE = 32  # bytes

Keys = tuple[bytes, bytes]
"""The key of the messages that an end sends, and of those that it receives."""


class Status(IntEnum):
    """The listener's answer."""

    ACCEPTED = 0
    BUSY = 1  # the slot is needed for another connection
    OTHER_KEY = 2
    MISDIRECTED = 3  # this process listens for another purpose


REFUSALS = {
    Status.BUSY: "it is busy with connections that are not authenticated yet",
    Status.OTHER_KEY: "it holds another key",
    Status.MISDIRECTED: "it is another process than the one that was called",
}


class Refused(Exception):
    """The other end is refused, or has refused; the message says why, with the subject "it".

    Args:
        reason: A sentence that contains nothing that the other end sent.
        status: The status that a listener sends before it closes the connection, or has sent;
            None if it sends none.
    """

    def __init__(self, reason: str, status: Status | None = None) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Step:
    """Bytes to send and the number of bytes to wait for; in the last step, the keys."""

    send: bytes
    size: int
    keys: Keys | None = None


HandshakeSteps = Generator[Step, bytes, None]
"""One end of a handshake: yields steps, and receives the bytes that each step waits for."""


def call(secret: bytes, purpose: str) -> HandshakeSteps:
    """Run the caller's end of a handshake.

    Raises:
        Refused: The listener refused this end, or does not have the secret.
    """
    opening = GREETING + _identify(purpose) + secrets.token_bytes(NONCE)
    opening += _derive(secret, "introduction", opening)
    _require_accepted((yield Step(opening, 1)))
    nonce = yield Step(b"", NONCE)
    session = _derive(secret, "connection", opening + nonce)
    _require_accepted((yield Step(_derive(session, "proof of the caller"), 1)))
    proof = yield Step(b"", PROOF)
    if not hmac.compare_digest(proof, _derive(session, "proof of the listener")):
        raise Refused("it does not prove that it holds the key")
    yield Step(b"", 0, (_derive(session, "from the caller"), _derive(session, "from the listener")))


def answer(secret: bytes, purpose: str) -> HandshakeSteps:
    """Run the listener's end of a handshake; the caller proves itself first.

    Raises:
        Refused: The caller does not have the secret, or another purpose.
    """
    greeting = yield Step(b"", len(GREETING))
    if greeting != GREETING:
        raise Refused("it is not a process of this version of Lockstep")
    named = yield Step(b"", PURPOSE + NONCE)
    introduction = yield Step(b"", PROOF)
    if not hmac.compare_digest(introduction, _derive(secret, "introduction", greeting + named)):
        raise Refused("it holds another key", Status.OTHER_KEY)
    if named[:PURPOSE] != _identify(purpose):
        raise Refused("it called another process", Status.MISDIRECTED)
    nonce = secrets.token_bytes(NONCE)
    session = _derive(secret, "connection", greeting + named + introduction + nonce)
    proof = yield Step(bytes([Status.ACCEPTED]) + nonce, PROOF)
    if not hmac.compare_digest(proof, _derive(session, "proof of the caller")):
        raise Refused("it repeated messages of another connection")
    last = bytes([Status.ACCEPTED]) + _derive(session, "proof of the listener")
    keys = _derive(session, "from the listener"), _derive(session, "from the caller")
    yield Step(last, 0, keys)


def _require_accepted(said: bytes) -> None:
    if said[0] == Status.ACCEPTED:
        return
    if said[0] not in REFUSALS:
        raise Refused("it is not a process of this version of Lockstep")
    status = Status(said[0])
    raise Refused(REFUSALS[status], status)


def _identify(purpose: str) -> bytes:
    return hashlib.sha256(purpose.encode()).digest()


def _derive(key: bytes, label: str, content: bytes = b"") -> bytes:
    return hmac.digest(key, label.encode() + b"\n" + content, "sha256")
