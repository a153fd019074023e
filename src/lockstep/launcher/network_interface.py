"""The network interface by which the ranks of a host reach those of other hosts.

Nothing is derived from host names: a host's own name often resolves to 127.0.1.1 (Debian), to an
interface that other hosts cannot reach, or not at all. Each rank asks the kernel for the route to
another host instead. Rank 0's host cannot ask for the route to MASTER_ADDR, which is the host
itself, so every rank on another host registers its own address (`rendezvous_check.py`):

    a rank on the master's host      asks for the route to the first such address
    a rank on another host           asks for the route to MASTER_ADDR
"""

from __future__ import annotations

import hashlib
import os
import socket

import psutil

from lockstep.comm.hosts.identity import address_towards, describe_namespaces, is_loopback
from lockstep.kernel.errors import RendezvousError
from lockstep.launcher.environment import RankInfo
from lockstep.launcher.listening_socket import LOOPBACK, resolve_address

__all__ = [
    "ALONE",
    "UNKNOWN",
    "describe_network",
    "find_interface",
    "find_master_interface",
    "find_own_addresses",
]

ALONE, UNKNOWN = "alone", "unknown"
"""Instead of another host's address: all ranks are on one host, or a tunnel hides the others."""


def find_interface(rank_info: RankInfo, other: str = ALONE) -> str | None:
    """Return the network interface that this rank should use.

    Args:
        rank_info: This rank.
        other: The address of another host than the master's; ALONE or UNKNOWN.

    Returns:
        The loopback interface if all ranks are on this host, otherwise the interface of the route
        to the other hosts. None if the loopback interface is down, or if this host's address on
        that route belongs to the loopback interface, whose name would select 127.0.0.1.

    Raises:
        RendezvousError: There is no route to the other hosts, or it cannot be found.
    """
    address = _choose_address(rank_info, other)
    name = find_own_addresses().get(address_towards(address))
    if name is None or (address != LOOPBACK and find_own_addresses().get(LOOPBACK) == name):
        return None
    return name


def find_master_interface(master_addr: str) -> str | None:
    """Return the interface of the route to the master, or on its host, that of its address.

    For ranks that have nobody to ask yet. None if it cannot be found, or is the loopback interface
    although the address is not.
    """
    _, master = resolve_address(master_addr)
    addresses = find_own_addresses()
    name = addresses.get(master if master in addresses else address_towards(master))
    return None if name == addresses.get(LOOPBACK) and not is_loopback(master) else name


def describe_network(master_addr: str) -> tuple[str, str]:
    """Return what processes share with this one's network, and this host's address in it.

    The address is that on the route to the master; "" on the master's host.
    """
    _, master = resolve_address(master_addr)
    own = "" if _is_here(master) else address_towards(master)
    return hashlib.blake2b(describe_namespaces("net").encode(), digest_size=8).hexdigest(), own


def _choose_address(rank_info: RankInfo, other: str) -> str:
    """Return the address to ask the route to: of another host, or LOOPBACK if there is none."""
    if other == ALONE or rank_info.master_addr is None:
        return LOOPBACK
    _, master = resolve_address(rank_info.master_addr)
    if not _is_here(master):
        other, whose = master, "MASTER_ADDR"
    elif other != UNKNOWN:
        whose = "another host of this run"
    elif "GLOO_SOCKET_IFNAME" in os.environ:
        return LOOPBACK  # not used: the variable has priority
    else:
        raise RendezvousError(
            f"rank {rank_info.rank}: the ranks meet at {rank_info.store_location}, which is "
            f"the loopback interface of several hosts (a tunnel?), so they cannot find the network "
            f"between these hosts: set MASTER_ADDR to an address of rank 0's host that the other "
            f"hosts reach, or GLOO_SOCKET_IFNAME on every host"
        )
    if not address_towards(other):
        raise RendezvousError(
            f"rank {rank_info.rank}: this host has no route to {other} ({whose}): check its "
            f"interfaces and routes (ip addr, ip route get {other})"
        )
    return other


def _is_here(master: str) -> bool:
    return is_loopback(master) or master in find_own_addresses()


def find_own_addresses() -> dict[str, str]:
    """Return the addresses of this host, with the interface of each."""
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
