"""The network interface by which the ranks of a host reach those of other hosts.

Nothing is derived from host names: a host's own name often resolves to 127.0.1.1 (Debian), to an
interface that other hosts cannot reach, or not at all. Each rank asks the kernel for the route to
another host instead. Rank 0's host cannot ask for the route to MASTER_ADDR, which is the host
itself, so the ranks exchange an address through the store:

    key                    written by                                        value
    network/host           the first rank on the master's host               identity of this host
    network/local          every rank on the master's host adds 1            how many there are
    network/other          the first rank on another host                    its own address
                           the last rank, if all are on the master's host    ALONE
                           a rank whose MASTER_ADDR leads to another host    UNKNOWN
                           although the address is its own (a tunnel)

    a rank on the master's host      asks for the route to the address in network/other
    a rank on another host           asks for the route to MASTER_ADDR

Every user who can reach the store can write to it, so that values are validated.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.kernel.errors import RendezvousError
from lockstep.launcher.environment import RankInfo
from lockstep.launcher.listening_socket import (
    LOOPBACK,
    find_source_address,
    is_loopback,
    resolve_address,
)

__all__ = [
    "find_interface",
    "find_master_interface",
    "find_own_addresses",
    "find_served_address",
    "network_identity",
]

ALONE, UNKNOWN = "alone", "unknown"
MAX_VALUE = 100  # bytes of a value in the store


def find_interface(rank_info: RankInfo, store: Store | None = None) -> str | None:
    """Return the network interface that this rank should use, after an exchange with all ranks.

    Args:
        rank_info: This rank.
        store: The store of this world. None: all ranks are on this host.

    Returns:
        The loopback interface if all ranks are on this host, otherwise the interface of the route
        to the other hosts. None if the loopback interface is down, or if this host's address on
        that route belongs to the loopback interface, whose name would select 127.0.0.1.

    Raises:
        RendezvousError: There is no route to the other hosts, or another program has written into
            the store.
    """
    address = LOOPBACK
    if store is not None and rank_info.master_addr is not None:
        address = _exchange(rank_info, store, rank_info.master_addr)
    own = find_source_address(address)
    name = None if own is None else find_own_addresses().get(own)
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
    own = master if master in addresses else find_source_address(master)
    name = None if own is None else addresses.get(own)
    return None if name == addresses.get(LOOPBACK) and not is_loopback(master) else name


def find_served_address(address: str) -> str:
    """Return the address at which other hosts reach a port of this host.

    Args:
        address: The address of the master, by which they have reached it.

    Returns:
        The same address if it is this host's own, which other hosts may resolve differently;
        otherwise this host's address on the route there.
    """
    _, master = resolve_address(address)
    if is_loopback(master) or master in find_own_addresses():
        return address
    return find_source_address(master) or address


def network_identity() -> str:
    """Return a text that is the same for processes that share a loopback interface."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/thread-self/ns/net').st_ino}"
    except OSError:
        return f"{socket.gethostname()[:64]} {psutil.boot_time():.0f}"


def _exchange(rank_info: RankInfo, store: Store, master_addr: str) -> str:
    """Return the address to ask the route to: of another host, or LOOPBACK if there is none."""
    _, master = resolve_address(master_addr)
    if not is_loopback(master) and master not in find_own_addresses():
        own = find_source_address(master)
        if own is None:
            raise _no_route(rank_info, master, "MASTER_ADDR")
        store.compare_set("network/other", "", own)
        return master
    identity = network_identity()
    if store.compare_set("network/host", "", identity) != identity.encode():
        store.compare_set("network/other", "", UNKNOWN)
    if store.add("network/local", 1) == rank_info.world_size:
        store.compare_set("network/other", "", ALONE)
    other = _parse_address(rank_info, store.get("network/other"))
    if other == ALONE:
        return LOOPBACK
    if other == UNKNOWN:
        if "GLOO_SOCKET_IFNAME" in os.environ:
            return LOOPBACK  # not used: the variable has priority
        raise RendezvousError(
            f"rank {rank_info.rank}: the ranks meet at {rank_info.store_location}, which is "
            f"the loopback interface of several hosts (a tunnel?), so they cannot find the network "
            f"between these hosts: set MASTER_ADDR to an address of rank 0's host that the other "
            f"hosts reach, or GLOO_SOCKET_IFNAME on every host"
        )
    if find_source_address(other) is None:
        raise _no_route(rank_info, other, "another host of this run")
    return other


def _no_route(rank_info: RankInfo, address: str, whose: str) -> RendezvousError:
    return RendezvousError(
        f"rank {rank_info.rank}: this host has no route to {address} ({whose}): check its "
        f"interfaces and routes (ip addr, ip route get {address})"
    )


def _parse_address(rank_info: RankInfo, value: bytes) -> str:
    """Return the value of network/other: an address in its usual form, ALONE or UNKNOWN."""
    with contextlib.suppress(ValueError):
        text = value[:MAX_VALUE].decode()
        if text in (ALONE, UNKNOWN):
            return text
        address = ipaddress.ip_address(text)
        if not (address.is_loopback or address.is_unspecified or address.is_multicast):
            return str(address)
    raise RendezvousError(
        f"rank {rank_info.rank}: the value of 'network/other' in the store at "
        f"{rank_info.store_location} was not written by a rank of Lockstep: another program or "
        f"user writes into this store; use another port (MASTER_PORT)"
    )


def find_own_addresses() -> dict[str, str]:
    """Return the addresses of this host, with the interface of each."""
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
