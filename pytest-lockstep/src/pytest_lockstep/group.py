"""Joining torch.distributed's default group in a rank, and leaving it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.comm import backend as comm
from lockstep.launcher import rendezvous
from lockstep.launcher.environment import read_rank_info

__all__ = ["join_group"]


@contextlib.contextmanager
def join_group(backend: str, timeout: float) -> Iterator[None]:
    """Join the group that the environment describes; leave it after the body.

    Unlike `lockstep.init`, this changes no setting of torch.

    Args:
        backend: The backend; "lockstep" is replaced by "gloo" where it is not available.
        timeout: Seconds to wait for the other ranks, and for each collective.
    """
    rank_info = read_rank_info(os.environ)
    comm.register()
    if backend == comm.NAME and not comm.available():
        backend = "gloo"
    store = rendezvous.wait_for_ranks(rank_info, timeout)
    if backend != comm.NAME and "GLOO_SOCKET_IFNAME" not in os.environ:
        name = rendezvous.choose_interface(rank_info, store)  # 3 ms
        os.environ.update({} if name is None else {"GLOO_SOCKET_IFNAME": name})
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")  # lets DDP use the backend's memory
    dist.init_process_group(
        backend,
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timedelta(seconds=timeout),
    )
    if backend == "gloo":
        # Gloo returns as soon as this rank is connected. If the rank then left the group at once,
        # it would close connections that a slower rank is still setting up, and that rank would
        # fail.
        dist.all_reduce(torch.zeros(1))
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
