"""The handshake: both ends prove that they hold the key, and agree on who they are.

    caller                                                                   listener
      ── greeting, caller, called, session, nonce C, introduction ─────────────>
      <─ status, nonce L ───────────────────────────────────────────────────────
      ── proof of the caller ──────────────────────────────────────────────────>
      <─ status, proof of the listener ─────────────────────────────────────────
      ══ frames (frame.py), with one key for each direction ════════════════════

    introduction  HMAC(key, "introduction", greeting ... nonce C)
    secret        HMAC(key, "connection", all of the first message, nonce L)
    proofs, keys  HMAC(secret, label), with a label for each of the four

HMAC is HMAC-SHA-256. The secret covers everything that was sent: both identities, the
session and both nonces. Two ends with the same secret therefore agree on both
identities. A connection fails if it is redirected to another worker or a later session,
reflected, or composed of recorded ones. The address of the listener is not covered, because
an SSH tunnel changes it.

The introduction comes first, so that a listener can tell callers with the key from strangers
by their first message (`listener.py`). It could be recorded, so it proves nothing else:
frames are accepted only after the proof, which covers nonce L.

Every message has a fixed length, so a stranger cannot make this process allocate memory. A
stranger learns that Lockstep listens here, and why it is refused. The status is not
authenticated: it says why the other end closed the connection, and affects only the error
message and whether the caller tries again.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from enum import IntEnum

from lockstep.transport.credentials import (
    SESSION,
    UNKNOWN_SESSION,
    Credentials,
    Identity,
    Role,
)

__all__ = ["Agreement", "Refused", "Status", "Step", "Steps", "answer", "call"]

GREETING = b"lockstep secret 3\n"
NONCE = PROOF = 32  # bytes
IDENTITY = Identity.LAYOUT.size


class Status(IntEnum):
    """The listener's answer."""

    ACCEPTED = 0
    BUSY = 1  # the slot is needed for another connection
    OTHER_KEY = 2
    MISDIRECTED = 3  # this is not the process that was called


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
class Agreement:
    """The result of a handshake: the identity of the other end, and a key for each direction."""

    other: Identity
    sending: bytes
    receiving: bytes


@dataclass(frozen=True)
class Step:
    """Bytes to send and the number of bytes to wait for; in the last step, the agreement."""

    send: bytes
    size: int
    agreement: Agreement | None = None


Steps = Generator[Step, bytes, None]
"""One end of a handshake: yields steps, and receives the bytes that each step waits for."""


def call(credentials: Credentials, called: Identity) -> Steps:
    """Run the caller's end of a handshake with `called`.

    Raises:
        Refused: The listener refused this end, is not `called`, or does not have the key.
    """
    named = credentials.own.pack() + called.pack() + credentials.session
    opening = GREETING + named + secrets.token_bytes(NONCE)
    opening += _derive(credentials.key, "introduction", opening)
    _require_accepted((yield Step(opening, 1)))
    nonce = yield Step(b"", NONCE)
    secret = _derive(credentials.key, "connection", opening + nonce)
    _require_accepted((yield Step(_derive(secret, "proof of the caller"), 1)))
    proof = yield Step(b"", PROOF)
    if not hmac.compare_digest(proof, _derive(secret, "proof of the listener")):
        raise Refused("it does not prove that it holds the key")
    sending, receiving = _derive(secret, "from the caller"), _derive(secret, "from the listener")
    yield Step(b"", 0, Agreement(called, sending, receiving))


def answer(credentials: Credentials) -> Steps:
    """Run the listener's end of a handshake; the caller proves itself first.

    Raises:
        Refused: The caller does not hold the key, or called another process.
    """
    greeting = yield Step(b"", len(GREETING))
    if greeting != GREETING:
        raise Refused("it is not a process of this version of Lockstep")
    named = yield Step(b"", 2 * IDENTITY + SESSION + NONCE)
    introduction = yield Step(b"", PROOF)
    opening = greeting + named
    if not hmac.compare_digest(introduction, _derive(credentials.key, "introduction", opening)):
        raise Refused("it holds another key", Status.OTHER_KEY)
    caller = _unpack_identity(named[:IDENTITY])
    called, session = named[IDENTITY : 2 * IDENTITY], named[2 * IDENTITY : -NONCE]
    # A node agent gets the session from the driver, once both have proven themselves.
    known = session == credentials.session or (
        session == UNKNOWN_SESSION and caller.role is Role.NODE_AGENT
    )
    if called != credentials.own.pack() or not known:
        raise Refused("it called another process", Status.MISDIRECTED)
    nonce = secrets.token_bytes(NONCE)
    secret = _derive(credentials.key, "connection", opening + introduction + nonce)
    proof = yield Step(bytes([Status.ACCEPTED]) + nonce, PROOF)
    if not hmac.compare_digest(proof, _derive(secret, "proof of the caller")):
        raise Refused("it repeated messages of another connection")
    proof = _derive(secret, "proof of the listener")
    sending, receiving = _derive(secret, "from the listener"), _derive(secret, "from the caller")
    yield Step(bytes([Status.ACCEPTED]) + proof, 0, Agreement(caller, sending, receiving))


def _unpack_identity(named: bytes) -> Identity:
    try:
        return Identity.unpack(named)
    except ValueError as error:
        raise Refused("it is not a process of this version of Lockstep") from error


def _require_accepted(said: bytes) -> None:
    if said[0] not in list(Status):
        raise Refused("it is not a process of this version of Lockstep")
    status = Status(said[0])
    if status is Status.BUSY:
        raise Refused("it is busy with connections that are not authenticated yet", status)
    if status is Status.OTHER_KEY:
        raise Refused("it holds another key", status)
    if status is Status.MISDIRECTED:
        raise Refused("it is another process than the one that was called", status)


def _derive(key: bytes, label: str, content: bytes = b"") -> bytes:
    return hmac.digest(key, label.encode() + b"\n" + content, "sha256")
