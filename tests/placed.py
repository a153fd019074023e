"""Ranks that count as on several hosts, though they are on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.comm import backend
from lockstep.comm.hosts.identity import IDENTITY
from lockstep.comm.hosts.map import HostMap


def join(placement: str, **options: Any) -> Any:
    """Join the world with rank r on host `placement[r]`; return the HostGroup of the world."""
    os.environ[IDENTITY] = placement[int(os.environ["RANK"])]
    ls.init(backend="lockstep", **{"timeout": 30.0, **options})
    return backend.host_group_of(None)


@contextmanager
def simulated_hosts(hosts: Sequence[Sequence[int]]) -> Iterator[Any]:
    """Make the group that `HostReducer` takes, of a world with the backend gloo."""
    found, rank = HostMap(tuple(tuple(ranks) for ranks in hosts)), dist.get_rank()
    groups = [dist.new_group(list(ranks), backend="lockstep") for ranks in found.hosts]
    mine = groups[found.host_of(rank)]
    between = dist.group.WORLD._get_backend(torch.device("cpu"))
    yield SimpleNamespace(map=found, rank=rank, local=backend.of_group(mine), between=between)
    dist.destroy_process_group(mine)
