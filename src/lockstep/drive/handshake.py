"""The handshake: both ends prove that they hold the key before anything else is read.

    caller                                       listener
      ── greeting, nonce C, 32 bytes ──────────────>
      <─ greeting, nonce L, 32 bytes ───────────────
      ── HMAC(key, "caller" C L) ──────────────────>   the caller proves itself first,
      <─ HMAC(key, "listener" C L) ─────────────────   so a stranger learns nothing
      ══ frames under HMAC(key, "from caller" C L), HMAC(key, "from listener" C L)

Every message has a fixed length, so garbage is refused and costs no memory. The
proofs differ by direction, so none can be sent back as one's own; the nonces are
new each time, so none can be repeated.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

from lockstep.drive.frame import Wire

__all__ = ["PATIENCE", "Refused", "answer", "call"]

GREETING = b"lockstep driver 1\n"
NONCE = 32
PATIENCE = 10.0  # seconds for the whole of it


class Refused(Exception):
    """The other end is not of this driver; the message says in what way."""


def call(end: socket.socket, key: bytes, silence: float) -> Wire:
    """Prove this end, which connected; afterwards the socket waits `silence` seconds at most.

    Raises Refused where the listener is no driver, or holds another key.
    """
    try:
        deadline = time.monotonic() + PATIENCE
        mine = secrets.token_bytes(NONCE)
        end.sendall(GREETING + mine)
        nonces = mine + _greeted(end, deadline)
        end.sendall(_proof(key, b"caller", nonces))
        _check(end, key, b"listener", nonces, deadline)
    except (OSError, EOFError) as error:
        raise Refused("it hung up, as one does that holds another key") from error
    return _wire(end, key, nonces, b"from caller", b"from listener", silence)


def answer(end: socket.socket, key: bytes, silence: float) -> Wire:
    """Prove this end, which was connected to, after the caller has proven itself."""
    try:
        deadline = time.monotonic() + PATIENCE
        theirs = _greeted(end, deadline)
        mine = secrets.token_bytes(NONCE)
        end.sendall(GREETING + mine)
        nonces = theirs + mine
        _check(end, key, b"caller", nonces, deadline)
        end.sendall(_proof(key, b"listener", nonces))
    except (OSError, EOFError) as error:
        raise Refused("it hung up or said nothing") from error
    return _wire(end, key, nonces, b"from listener", b"from caller", silence)


def _wire(
    end: socket.socket, key: bytes, nonces: bytes, sending: bytes, receiving: bytes, silence: float
) -> Wire:
    end.settimeout(silence)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Wire(end, _proof(key, sending, nonces), _proof(key, receiving, nonces))


def _greeted(end: socket.socket, deadline: float) -> bytes:
    if _receive(end, len(GREETING), deadline) != GREETING:
        raise Refused("what it said is no greeting of lockstep's")
    return _receive(end, NONCE, deadline)


def _check(end: socket.socket, key: bytes, role: bytes, nonces: bytes, deadline: float) -> None:
    said = _receive(end, NONCE, deadline)
    if not hmac.compare_digest(said, _proof(key, role, nonces)):
        raise Refused("it holds another key")


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + b"\n" + nonces, "sha256")


def _receive(end: socket.socket, size: int, deadline: float) -> bytes:
    """Receive a few bytes; the deadline holds however slowly they come."""
    said = b""
    while len(said) < size:
        end.settimeout(max(0.001, deadline - time.monotonic()))
        piece = end.recv(size - len(said))
        if not piece:
            raise EOFError
        said += piece
    return said
