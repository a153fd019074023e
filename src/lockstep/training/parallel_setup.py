"""The parallel context of a trainer on this rank, in the layout that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.backend import host_group_of
from lockstep.comm.collectives import gather_unless_equal
from lockstep.comm.hosts.identity import identify_host
from lockstep.comm.hosts.map import HostMap
from lockstep.data.assignment import Hosts, on_one_host
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.kernel.loss_scale import LossScale
from lockstep.kernel.loss_weights import WeightFunction
from lockstep.launcher.world import World
from lockstep.model.buffer_exchange import GroupExchange
from lockstep.model.collective_calls import wrap_collective_calls
from lockstep.model.group_exchange import GroupMessages
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.target_weights import infer_weight_function

__all__ = ["find_replica_hosts", "make_parallel_context"]


def make_parallel_context(
    world: World,
    microbatches: int,
    loss: Callable[..., Any] | None,
    loss_weight: WeightFunction | None,
    autocast_dtype: torch.dtype | None,
    extra_modules: Sequence[nn.Module],
    stages: int = 1,
    activation_checkpointing: bool = False,
    is_sharded: bool = False,
    is_hybrid: bool = False,
) -> ParallelContext:
    """Return the context of a trainer on this rank.

    A replica consists of `stages` consecutive ranks, each with its part of the model. If
    `is_sharded`, all ranks divide one model, or, if `is_hybrid`, those of each host do.

    Raises:
        LayoutError: The layout is impossible.
        UsageError: The loss has parameters, or the dtype is not supported.
    """
    wrap_collective_calls()
    _check_stages(world.world_size, stages, extra_modules)
    _check(world.world_size // stages, microbatches, autocast_dtype)
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise UsageError(
            f"the loss {type(loss).__name__} has parameters, which would not be trained: make "
            "it a part of the model, which then returns its loss (loss=None)"
        )
    peers = _peers(world, stages)
    if not is_sharded:
        hosts = find_replica_hosts(world.world_size, stages)
    else:
        hosts = _ask_hosts(world.world_size) if is_hybrid else on_one_host(world.world_size)
    return ParallelContext(
        microbatches=microbatches,
        rank=world.rank,
        stages=stages,
        device=world.device,
        loss=loss,
        loss_weight=loss_weight or infer_weight_function(loss),
        autocast_dtype=None if autocast_dtype == torch.float32 else autocast_dtype,
        group=None,
        peers=peers,
        messages=GroupMessages(None),
        make_buffer_exchange=partial(GroupExchange, peers),
        hosts=hosts,
        extra_modules=tuple(extra_modules),
        activation_checkpointing=activation_checkpointing,
        loss_scale=LossScale() if autocast_dtype == torch.float16 else None,
        is_sharded=is_sharded,
    )


def _check(replicas: int, microbatches: int, autocast_dtype: torch.dtype | None) -> None:
    if microbatches < 1:
        raise LayoutError(f"microbatches={microbatches}: a batch is split into at least one")
    if replicas > microbatches:
        raise LayoutError(
            f"{replicas} replicas share {microbatches} micro-batches, so some would have none: "
            f"start at most {microbatches} ranks, or train with microbatches={replicas} or more "
            "(which changes the bits)"
        )
    if autocast_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise UsageError(
            "autocast_dtype must be torch.bfloat16, torch.float16 or torch.float32, not "
            f"{autocast_dtype}"
        )


def _check_stages(ranks: int, stages: int, extra_modules: Sequence[nn.Module]) -> None:
    if stages < 1:
        raise LayoutError(f"stages={stages}: expected at least one")
    if ranks % stages:
        raise LayoutError(
            f"{ranks} rank(s) cannot hold replicas of {stages} stages, one rank each: start "
            f"{stages} ranks, or a multiple of that"
        )
    if stages > 1 and extra_modules:
        raise LayoutError(
            "extra_modules, which a manual step calls in addition to the model, cannot be split "
            "into stages: train them with stages=1"
        )


def find_replica_hosts(ranks: int, stages: int) -> Hosts:
    """Return the replicas of each host; a replica belongs to the host of its first rank."""
    group = host_group_of(None) if dist.is_initialized() else None
    if group is None:
        return on_one_host(ranks // stages)
    by_host: dict[int, list[int]] = {}
    for replica in range(ranks // stages):
        by_host.setdefault(group.map.host_of(replica * stages), []).append(replica)
    return tuple(tuple(replicas) for replicas in by_host.values())


def _ask_hosts(ranks: int) -> Hosts:
    """Return the ranks of each host, with any backend; a collective."""
    own = identify_host().encode()
    identities = gather_unless_equal(own, "finding the hosts of the ranks") if ranks > 1 else []
    return HostMap.of(identities or [own] * ranks).hosts


_groups: WeakKeyDictionary[Any, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()
"""For each world, the group of the ranks with the same stages as this one, by number of stages."""


def _peers(world: World, stages: int) -> dist.ProcessGroup | None:
    """Return the group of the ranks with the same stages; None for all ranks.

    All trainers with the same number of stages use one group, since each group keeps a thread,
    descriptors and memory until the world ends.
    """
    if stages == 1:
        return None
    known = _groups.setdefault(dist.group.WORLD, {})
    if stages not in known:
        groups: list[dist.ProcessGroup] = [
            dist.new_group(list(range(position, world.world_size, stages)))
            for position in range(stages)
        ]
        known[stages] = groups[world.rank % stages]
    return known[stages]
