"""Which host a rank is on, and the hosts of the other ranks.

Ranks are on one host if they can share memory: the same machine, process numbers and network. The
groups of a world whose ranks may be on several hosts exchange this through their stores.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = [
    "IDENTITY",
    "address_towards",
    "declare_world",
    "find_hosts",
    "identify_host",
    "is_loopback",
]

IDENTITY = "LOCKSTEP_HOST_IDENTITY"
"""An environment variable for tests: ranks with different values count as on different hosts."""

LOOPBACK_NAMES = ("localhost", "ip6-localhost")


_declared: bool | None = None  # see `declare_world`


def declare_world(is_single_host: bool) -> None:
    """State whether all ranks of the world that is joined next are known to be on one host.

    Without this, the environment variables of torchrun are read.
    """
    global _declared
    _declared = is_single_host


def identify_host() -> str:
    """Return a text that processes have in common if they can share memory.

    Containers of one machine differ, as they have their own process numbers or networks. Host
    names alone do not decide: they may be equal, or empty.
    """
    return os.environ.get(IDENTITY) or describe_namespaces("pid", "net")


def describe_namespaces(*kinds: str) -> str:
    """Return a text that processes of one machine have in common if they share namespaces."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    for kind in kinds:
        with suppress(OSError):
            parts.append(os.readlink(f"/proc/thread-self/ns/{kind}"))
    return " ".join(parts)


def address_towards(host: str) -> str:
    """Return this host's address on the route to another one, or "" if there is none."""
    # As bytes: for text, every rank would import the codec of international names.
    name = host.encode() if host.isascii() else host
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    return ""


def is_loopback(address: str) -> bool:
    """Return whether an address or host name always means the host itself."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address in LOOPBACK_NAMES


def is_surely_one_host(size: int) -> bool:
    """Return whether the environment says that all ranks of the world are on one host."""
    if os.environ.get(IDENTITY):
        return False
    if _declared is not None:
        return _declared
    local = os.environ.get("LOCAL_WORLD_SIZE")
    world = os.environ.get("WORLD_SIZE")
    if local is not None and local == world:
        return True
    master = os.environ.get("MASTER_ADDR", "")
    return size == 1 or (local is None and (not master or is_loopback(master)))


def find_hosts(
    store: Any, rank: int, size: int, timeout: timedelta
) -> list[tuple[str, str]] | None:
    """Return the host of each rank of a new group, as (identity, name); None if it is surely one.

    Args:
        store: The store of the group.
        rank: This rank in the group.
        size: The number of ranks of the group.
        timeout: The time to wait for the other ranks.

    Raises:
        RuntimeError: Another rank did not come before the timeout.
    """
    if is_surely_one_host(size):
        return None
    name = os.environ.get(IDENTITY) or socket.gethostname() or "without a name"
    store.set(f"lockstep/host/{rank}", json.dumps([identify_host(), name]))
    keys = [f"lockstep/host/{member}" for member in range(size)]
    store.wait(keys, timeout)
    return [tuple(json.loads(value)) for value in store.multi_get(keys)]
