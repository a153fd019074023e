"""Listening sockets, and the addresses that they are bound to.

The launcher binds the socket of the ranks' store before it starts any rank, and passes the
socket on, so no other program can take the port in between. The socket listens on the loopback
interface unless several hosts take part.
"""

from __future__ import annotations

import errno
import re
import socket

from lockstep.comm.hosts.identity import address_towards, is_loopback
from lockstep.kernel.errors import UsageError
from lockstep.messages import log

__all__ = [
    "DEFAULT_PORT",
    "LOOPBACK",
    "find_obstacle",
    "get_connectable_address",
    "listen",
    "parse_endpoint",
    "resolve_address",
    "strip_brackets",
    "warn_of_strangers",
]

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
CONNECT_TIMEOUT = 5.0  # seconds
BACKLOG = 1024  # every rank of a host may connect at the same moment


def parse_endpoint(text: str, option: str = "--rdzv-endpoint") -> tuple[str, int]:
    """Return address and port of "HOST" (port 29500) or "HOST:PORT".

    An IPv6 address is written in brackets if a port follows: "[::1]:29500".

    Raises:
        UsageError: The port is not a number; the message names `option`.
    """
    if match := re.fullmatch(r"\[([^\]]*)\](?::(\d*))?", text):
        address = match[1]
        port = match[2]
    elif text.count(":") > 1:
        address = text
        port = ""
    else:
        address, _, port = text.partition(":")
    if port and not port.isdigit():
        raise UsageError(f"{option} {text}: expected HOST:PORT")
    return address, int(port) if port else DEFAULT_PORT


def strip_brackets(address: str) -> str:
    """Return "::1" for "[::1]"; other addresses as they are."""
    is_bracketed = address.startswith("[") and address.endswith("]")
    return address[1:-1] if is_bracketed else address


def listen(address: str, port: int, *, is_single_host: bool = True) -> socket.socket:
    """Return a socket that listens at `address`.

    The socket listens on every interface if the address belongs to none of this host (such as the
    external address of a container), and if it is the host's name with several hosts and resolves
    to a loopback address (127.0.1.1 on Debian), where other hosts cannot reach it.

    Args:
        address: A name or numeric address of this host.
        port: The port; 0 selects a free one.
        is_single_host: Whether every rank is on this host. Otherwise error messages add that the
            launcher of another host may hold the port.

    Raises:
        UsageError: The address is unknown, or the port is in use or not permitted.
    """
    family, host = resolve_address(address)
    if not is_single_host and is_loopback(host) and not is_loopback(address):
        family, host = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (family, "")
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if host == "::":
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # and IPv4
    try:
        _bind(listening, host, port)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} at {address} is in use by another program: choose another with "
                "--master-port (MASTER_PORT), or on a single host omit it, to use a free one"
                if is_single_host
                else f"port {port} at {address} is in use, by another program or by a launcher "
                f"with the same --node-rank: give each host its own --node-rank (RANK), or choose "
                f"another port with --master-port (MASTER_PORT)"
            ) from None
        if error.errno == errno.EACCES:
            raise UsageError(
                f"this user is not allowed to listen at port {port}: choose one from 1024 to "
                f"65535 with --master-port (MASTER_PORT)"
            ) from None
        raise
    return listening


def warn_of_strangers(address: str, port: int) -> None:
    """Warn that a store on the network admits everybody."""
    if not is_loopback(address):
        log(
            f"anyone who can reach {address}:{port} can join or disturb this run: use a private "
            f"network"
        )


def find_obstacle(listening: socket.socket) -> str:
    """Return why this host cannot connect to its own listening socket; "" if it can.

    A TCPStore connects to itself first, and repeats that for minutes if it fails.
    """
    host = get_connectable_address(listening)
    port = listening.getsockname()[1]
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        advice = ""
        if host in (LOOPBACK, "::1"):
            advice = ": is the loopback interface up? (ip link set lo up)"
        return f"this host cannot connect to its own address {host} ({reason}){advice}"
    return ""


def get_connectable_address(listening: socket.socket) -> str:
    """Return an address at which this host reaches a listening socket."""
    host = str(listening.getsockname()[0])
    if host == "::":
        is_both = not listening.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        return LOOPBACK if is_both else "::1"
    return LOOPBACK if host == "0.0.0.0" else host


def _bind(listening: socket.socket, host: str, port: int) -> None:
    try:
        listening.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        listening.bind(("", port))


def resolve_address(address: str) -> tuple[socket.AddressFamily, str]:
    """Return the address family and the numeric address of a host name.

    Of several addresses it is the first IPv4 address, unless this host only has a route to others.

    Raises:
        UsageError: The name does not resolve.
    """
    try:
        entries = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UsageError(
            f"MASTER_ADDR is {address!r}, which cannot be resolved on this host: set it "
            f"(--master-addr) to the name or address of rank 0's host"
        ) from None
    # IPv4 first: "localhost" is often both, and server and clients must choose the same one. But
    # a host without IPv4 may find an IPv4 address under a name.
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    pairs = [(family, str(numeric[0])) for family, _, _, _, numeric in entries]
    routed = (pair for pair in pairs if len(pairs) == 1 or address_towards(pair[1]))
    return next(routed, pairs[0])
