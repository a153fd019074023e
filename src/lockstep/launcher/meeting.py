"""The socket at which the ranks of a launch meet, bound before any of them starts.

Bound once and handed on, a port cannot be taken by another program between
choosing it and using it. It listens on the loopback interface alone unless
several hosts are asked for.
"""

from __future__ import annotations

import errno
import socket

from lockstep.errors import UsageError

__all__ = ["bind", "resolve"]

BACKLOG = 1024  # every rank of a host may connect in the same instant

Address = tuple[socket.AddressFamily, str]


def bind(address: str, port: int) -> socket.socket:
    """Return a socket that listens at `address`; `port` 0 takes a free one.

    An address that resolves but is no interface's of this host (a container's
    outside) is bound on every interface. UsageError for a port that is taken.
    """
    family, host = resolve(address)
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        _bind(listening, host, port)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} at {address} is in use by another program: choose another with "
                f"--master-port (MASTER_PORT), or none on one host, where a free one is found"
            ) from None
        if error.errno == errno.EACCES:
            raise UsageError(
                f"port {port} may not be used by this user: choose one from 1024 to 65535 with "
                f"--master-port (MASTER_PORT)"
            ) from None
        raise
    return listening


def _bind(listening: socket.socket, host: str, port: int) -> None:
    try:
        listening.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        listening.bind(("", port))


def resolve(address: str) -> Address:
    """Return the family and number of a host's name; UsageError where it has none."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UsageError(
            f"MASTER_ADDR is {address!r}, which names no host that can be found from here: set it "
            f"(--master-addr) to the name or address of rank 0's host"
        ) from None
    # Version 4 first: "localhost" is often both, and the server must be where the ranks look.
    family, _, _, _, place = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(place[0])
