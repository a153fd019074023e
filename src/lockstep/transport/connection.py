"""Connecting to a process that listens, and proving to it who this process is."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time

from lockstep.kernel.errors import RendezvousError, UsageError
from lockstep.transport.credentials import Credentials, Identity, Role
from lockstep.transport.frame import FrameSocket, receive_exactly
from lockstep.transport.handshake import Agreement, Refused, Status, Steps, call

__all__ = ["HANDSHAKE_TIMEOUT", "connect", "open_frame_socket", "requires_secret", "shake_hands"]

HANDSHAKE_TIMEOUT = 5.0  # seconds; the caller tries again
KEY_SIZE = 32  # bytes
RETRY = 0.2  # seconds between two attempts


class _AttemptFailed(Exception):
    """An attempt that may succeed when it is repeated; the message says why it failed."""


def connect(
    address: str,
    port: int,
    credentials: Credentials,
    called: Identity,
    silence: float,
    timeout: float = 10.0,
) -> FrameSocket:
    """Connect to `called`, trying again for `timeout` seconds.

    Args:
        address: Name or address of its host.
        port: The port at which it listens.
        credentials: The credentials of this process.
        called: The process that must answer; any other one is refused.
        silence: Seconds of silence after which the open connection counts as lost.
        timeout: Seconds until the last attempt.

    Raises:
        RendezvousError: It did not answer, was busy or closed the connection, or another
            process of Lockstep answered.
        UsageError: The address is unknown, or the process that listens there has another key or
            does not belong to this version of Lockstep.
    """
    deadline = time.monotonic() + timeout
    target = f"{called} at {address}:{port}"
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{address!r} cannot be resolved on this host") from error
    while True:
        try:
            attempt_timeout = min(HANDSHAKE_TIMEOUT, max(RETRY, deadline - time.monotonic()))
            return _attempt(address, port, call(credentials, called), attempt_timeout, silence)
        except Refused as error:
            if error.status is Status.MISDIRECTED:
                raise RendezvousError(f"{target} refused the connection: {error}") from error
            remedy = f": give both the same key, with {credentials.source}"
            raise UsageError(
                f"{target} refused the connection: {error}"
                f"{remedy if error.status is Status.OTHER_KEY else ''}"
            ) from error
        except _AttemptFailed as error:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"{target} could not be reached within {timeout:g} s: {error}"
                ) from error
            time.sleep(RETRY)


def requires_secret(address: str, port: int, timeout: float) -> bool:
    """Return whether a Lockstep process listens at an address and refuses those without its key."""
    stranger = Credentials(secrets.token_bytes(KEY_SIZE), Identity(Role.PEER))
    try:
        steps = call(stranger, stranger.own)
        _attempt(address, port, steps, timeout, timeout).end.close()
    except Refused as error:
        return error.status is Status.OTHER_KEY
    except _AttemptFailed:
        pass
    return False


def open_frame_socket(end: socket.socket, agreement: Agreement, silence: float) -> FrameSocket:
    """Return the frame socket of a connection on which the handshake is complete."""
    end.settimeout(silence)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return FrameSocket(end, agreement.sending, agreement.receiving)


def _attempt(address: str, port: int, steps: Steps, timeout: float, silence: float) -> FrameSocket:
    try:
        end = socket.create_connection((address, port), timeout)
    except OSError as error:
        raise _AttemptFailed((error.strerror or str(error)).lower()) from error
    with contextlib.ExitStack() as failing:
        failing.enter_context(end)
        try:
            agreement = shake_hands(end, steps, time.monotonic() + timeout)
            frames = open_frame_socket(end, agreement, silence)
        except TimeoutError as error:
            raise _AttemptFailed("it accepts connections but does not answer") from error
        except (OSError, EOFError) as error:
            raise _AttemptFailed(
                "it closes connections before the handshake is complete; it is shutting down, or "
                "is not a process of this version of Lockstep"
            ) from error
        except Refused as error:
            if error.status is Status.BUSY:
                raise _AttemptFailed(
                    f"{error}; check on its host which processes connect to that port"
                ) from error
            raise
        failing.pop_all()
    return frames


def shake_hands(end: socket.socket, steps: Steps, deadline: float) -> Agreement:
    """Run one end of a handshake until `deadline`, a `time.monotonic()` time.

    Raises:
        Refused: The other end is refused, or has refused.
        OSError: The connection broke; TimeoutError if the deadline passed.
        EOFError: The other end closed the connection.
    """
    step = next(steps)
    while step.agreement is None:
        end.settimeout(max(0.001, deadline - time.monotonic()))
        end.sendall(step.send)
        step = steps.send(bytes(receive_exactly(end, step.size)))
    return step.agreement
