"""The network interface by which the ranks of a host reach those of other hosts.

Nothing is derived from this host's own name, which often resolves to 127.0.1.1 (Debian), to an
interface that other hosts cannot reach, or not at all. Each rank asks the kernel instead:

    a rank on the master's host      for the interface with the address MASTER_ADDR, or that of the
                                     default route if MASTER_ADDR is the name of this host
    a rank on another host           for the route to MASTER_ADDR
"""

from __future__ import annotations

import os
import socket

import psutil

from lockstep.comm.hosts.identity import address_towards, is_loopback
from lockstep.kernel.errors import RendezvousError
from lockstep.launcher.listening_socket import LOOPBACK, resolve_address

__all__ = ["find_interface"]

ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # addresses for documentation, to which no route leads


def find_interface(master_addr: str) -> str | None:
    """Return the network interface that this rank should use.

    Args:
        master_addr: The address of rank 0's host; LOOPBACK if all ranks are on this host.

    Returns:
        None if the loopback interface is down, or if this host's address on the route to the others
        belongs to the loopback interface, whose name would select 127.0.0.1.

    Raises:
        RendezvousError: There is no route to the other hosts, or it cannot be found.
    """
    own = _find_own_addresses()
    if is_loopback(master_addr):
        return own.get(address_towards(LOOPBACK))
    _, master = resolve_address(master_addr)
    if is_loopback(master):
        address = next(filter(None, map(address_towards, ELSEWHERE)), "")
    else:
        address = master if master in own else address_towards(master)
    if not address and "GLOO_SOCKET_IFNAME" not in os.environ:
        raise RendezvousError(
            f"this host has no route to {master} (MASTER_ADDR): check its interfaces and routes "
            f"(ip addr, ip route get {master})"
            if not is_loopback(master)
            else f"MASTER_ADDR is {master_addr}, which is {master} here, and this host has no "
            f"default route: set MASTER_ADDR to an address that the other hosts reach, or "
            f"GLOO_SOCKET_IFNAME on every host"
        )
    name = own.get(address)
    return None if name == own.get(LOOPBACK) else name


def _find_own_addresses() -> dict[str, str]:
    """Return the addresses of this host, with the interface of each."""
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
