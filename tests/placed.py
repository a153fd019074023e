"""Ranks that count as on several hosts, though they are on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.comm import backend
from lockstep.comm.hosts.group import HostGroup
from lockstep.comm.hosts.identity import IDENTITY
from lockstep.comm.hosts.map import HostMap


def join(placement: str, **options: Any) -> Any:
    """Join the world with rank r on host `placement[r]`; return the HostGroup of the world."""
    os.environ[IDENTITY] = placement[int(os.environ["RANK"])]
    ls.init(**{"backend": "lockstep", "timeout": 30.0, **options})
    return backend.host_group_of(None)


@contextmanager
def simulated_hosts(hosts: Sequence[Sequence[int]]) -> Iterator[HostGroup]:
    """Make the HostGroup of a world with the backend gloo, whose ranks are on this machine."""
    map_ = HostMap(tuple(tuple(ranks) for ranks in hosts))
    rank = dist.get_rank()
    everyone = list(range(dist.get_world_size()))
    locals_ = [dist.new_group(list(ranks), backend="lockstep") for ranks in map_.hosts]
    between = dist.new_group(everyone, backend="gloo")
    group = HostGroup(
        map_, rank, everyone, [str(host) for host in range(len(hosts))], "default",
        dist.PrefixStore(f"{hosts}/", dist.distributed_c10d._get_default_store()),
        backend.of_group(locals_[map_.host_of(rank)]),
        between._get_backend(torch.device("cpu")), 30.0,
    )  # fmt: skip
    yield group
    dist.barrier()
    group.close()
    for made in (locals_[map_.host_of(rank)], between):
        dist.destroy_process_group(made)
