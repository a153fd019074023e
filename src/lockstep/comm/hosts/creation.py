"""Creation of a group whose ranks are on several hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from lockstep.comm.hosts.group import GLOO_MARGIN, HostGroup
from lockstep.comm.hosts.map import HostMap
from lockstep.comm.hosts.process_group import HostProcessGroup
from lockstep.comm.native_module import load_native

__all__ = ["create_across_hosts"]

INTERFACE = "GLOO_SOCKET_IFNAME"
"""A variable of torch, which `lockstep.init` sets to the interface of the route to other hosts."""


def create_across_hosts(
    store: Any,
    rank: int,
    hosts: Sequence[tuple[str, str]],
    timeout: timedelta,
    name: str,
    global_ranks: Sequence[int],
) -> HostProcessGroup:
    """Create the process group of this rank.

    Args:
        store: The store of the group.
        rank: This rank in the group.
        hosts: The identity and the name of the host of each rank.
        timeout: The time for the connections, and for each call.
        name: The name of the group.
        global_ranks: The ranks in the world; empty for 0, 1, ...

    Raises:
        RuntimeError: The ranks could not be connected, or not all have the native backend.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    on_hosts = HostMap.of([identity for identity, _ in hosts])
    ranks = list(global_ranks) or list(range(len(hosts)))
    shown = "default" if name in ("", "0") else name
    own = on_hosts.host_of(rank)
    local_ranks = on_hosts.hosts[own]
    local = load_native().create(
        store=PrefixStore(f"lockstep/host{own}/", store),
        rank=local_ranks.index(rank),
        size=len(local_ranks),
        timeout=timeout,
        name=shown,
        ranks=[ranks[member] for member in local_ranks],
    )
    try:
        gloo = _connect(PrefixStore("lockstep/gloo/", store), rank, len(hosts), timeout)
    except RuntimeError as error:
        names = [host for _, host in hosts]
        others = ", ".join(sorted({*names} - {names[rank]}))
        said = str(error).partition("\n")[0].rpartition("] ")[2]
        reason = (
            f"rank {ranks[rank]} on host {names[rank]} could not connect to the ranks on "
            f"{others} for group {shown} ({said}): check the network and the "
            "firewalls between the hosts"
        )
        local._abort_because(reason)
        raise RuntimeError(reason) from None
    host_names = [hosts[members[0]][1] for members in on_hosts.hosts]
    group_store = PrefixStore("lockstep/", store)
    group = HostGroup(
        on_hosts, rank, ranks, host_names, shown, group_store, local, gloo, timeout.total_seconds()
    )
    return HostProcessGroup(group, group_store)


def _connect(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect this rank to all others; return the `ProcessGroupGloo`."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout + GLOO_MARGIN
    # Not lazily: a lazy connection that is closed makes the next message wait for 100 s.
    names = [name for name in os.environ.get(INTERFACE, "").split(",") if name]
    options._devices = [
        ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in names
    ] or [ProcessGroupGloo.create_default_device(lazy_init=False)]
    return ProcessGroupGloo(store, rank, size, options)
