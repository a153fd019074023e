"""Connections: a call to a process that listens, as one end of a proven connection."""

from __future__ import annotations

import contextlib
import socket
import time

from lockstep.errors import RendezvousError, UsageError
from lockstep.launcher.listening_socket import resolve_address
from lockstep.remote.frame import Wire, exactly
from lockstep.remote.handshake import Agreement, Refused, Status, Steps, call
from lockstep.remote.identity import Credentials, Identity
from lockstep.remote.key import VARIABLE

__all__ = ["HANDSHAKE", "dial", "proven"]

HANDSHAKE = 5.0  # seconds that a handshake may take; a caller tries again
RETRY = 0.2  # seconds between two attempts


class _Failed(Exception):
    """An attempt that may succeed when it is made again; the message says why it failed."""


def dial(
    address: str,
    port: int,
    credentials: Credentials,
    called: Identity,
    silence: float,
    patience: float = 10.0,
) -> Wire:
    """Connect to `called`, trying again for `patience` seconds.

    Args:
        address: Name or address of its host.
        port: Where it listens.
        credentials: Those of this process.
        called: The process that must answer; any other one is refused.
        silence: Seconds that the connection may be silent later on.
        patience: Seconds until the last attempt.

    Raises:
        RendezvousError: It did not answer, was busy or hung up, or another process of
            Lockstep's answered.
        UsageError: The address is unknown, or what listens there has another key or is
            not a process of this version of Lockstep.
    """
    deadline = time.monotonic() + patience
    place = f"{called} at {address}:{port}"
    try:
        resolve_address(address)
    except UsageError as error:
        raise UsageError(f"{address!r} names no host that can be found from here") from error
    while True:
        try:
            timeout = min(HANDSHAKE, max(RETRY, deadline - time.monotonic()))
            return _attempt(address, port, call(credentials, called), timeout, silence)
        except Refused as error:
            if error.status is Status.MISDIRECTED:
                raise RendezvousError(f"{place} refused the connection: {error}") from error
            remedy = f": give both the same key, with a key file or {VARIABLE}"
            raise UsageError(
                f"{place} refused the connection: {error}"
                f"{remedy if error.status is Status.OTHER_KEY else ''}"
            ) from error
        except _Failed as error:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"{place} could not be reached within {patience:g} s: {error}"
                ) from error
            time.sleep(RETRY)


def proven(end: socket.socket, agreement: Agreement, silence: float) -> Wire:
    """Return the wire of a connection on which the handshake is complete."""
    end.settimeout(silence)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Wire(end, agreement.sending, agreement.receiving)


def _attempt(address: str, port: int, steps: Steps, timeout: float, silence: float) -> Wire:
    try:
        end = socket.create_connection((address, port), timeout)
    except OSError as error:
        raise _Failed((error.strerror or str(error)).lower()) from error
    with contextlib.ExitStack() as failing:
        failing.enter_context(end)
        try:
            agreement = _shake(end, steps, time.monotonic() + timeout)
            wire = proven(end, agreement, silence)
        except TimeoutError as error:
            raise _Failed("it accepts connections but does not answer") from error
        except (OSError, EOFError) as error:
            raise _Failed(
                "it closes connections before the handshake is complete; it is ending, or is not "
                "a process of this version of Lockstep"
            ) from error
        except Refused as error:
            if error.status is Status.BUSY:
                raise _Failed(f"{error}; see on its host who connects to that port") from error
            raise
        failing.pop_all()
    return wire


def _shake(end: socket.socket, steps: Steps, deadline: float) -> Agreement:
    step = next(steps)
    while step.agreement is None:
        end.settimeout(max(0.001, deadline - time.monotonic()))
        end.sendall(step.send)
        step = steps.send(bytes(exactly(end, step.size)))
    return step.agreement
