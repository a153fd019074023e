"""The parallel context: the layout, the loss and the arithmetic of a trainer's steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from lockstep.comm import backend
from lockstep.data.content_hash import hash_content
from lockstep.data.microbatch import map_tensors, split_batch
from lockstep.kernel.batch import Batch, BatchIdentity, Microbatch
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.kernel.layout import Messages
from lockstep.kernel.loss_scale import LossScale
from lockstep.kernel.loss_weights import WeightFunction, infer_weight_function
from lockstep.kernel.splitting import Hosts, ReplicaShare, on_one_host
from lockstep.kernel.step_context import NOTHING
from lockstep.launcher.world import World
from lockstep.model.activation_checkpointing import ActivationCheckpointing
from lockstep.model.buffer_exchange import GroupExchange
from lockstep.model.collective_calls import CollectiveCallGuard, wrap_collective_calls
from lockstep.model.group_exchange import GroupMessages

__all__ = ["ParallelContext"]


@dataclass(eq=False)
class ParallelContext:
    """The layout, the loss and the arithmetic of a trainer, as seen by this rank.

    All parts of a trainer hold the same object. `loss_scale` changes between steps, equally on all
    ranks. `is_recorded` is set while steps are recorded or replayed: batches are hashed then. The
    layout changes only in `enter`, at the beginning of a round of an elastic run.
    """

    microbatches: int
    rank: int
    replicas: int
    replica: int
    stages: int
    position: int
    device: torch.device
    threads: int
    loss: Callable[..., Any] | None
    loss_weight: WeightFunction | None
    autocast_dtype: torch.dtype | None
    group: dist.ProcessGroup | None
    peers: dist.ProcessGroup | None
    hosts: Hosts
    compression: str | None = None
    extra_modules: tuple[nn.Module, ...] = ()
    activation_checkpointing: bool = False
    loss_scale: LossScale | None = None
    is_recorded: bool = False

    def __post_init__(self) -> None:
        """Keep what every step or micro-batch asks for."""
        self._device_type = self.device.type
        self.messages: Messages = GroupMessages(self.group)
        self._share: ReplicaShare | None = None

    @classmethod
    def from_world(
        cls,
        world: World,
        microbatches: int,
        loss: Callable[..., Any] | None,
        loss_weight: WeightFunction | None,
        autocast_dtype: torch.dtype | None,
        extra_modules: Sequence[nn.Module],
        stages: int = 1,
        activation_checkpointing: bool = False,
    ) -> ParallelContext:
        """Return the context of a trainer on this rank.

        A replica consists of `stages` consecutive ranks, each with its part of the model.

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
        return cls(
            microbatches=microbatches,
            rank=world.rank,
            replicas=world.world_size // stages,
            replica=world.rank // stages,
            stages=stages,
            position=world.rank % stages,
            device=world.device,
            threads=torch.get_num_threads(),
            loss=loss,
            loss_weight=loss_weight or infer_weight_function(loss),
            autocast_dtype=None if autocast_dtype == torch.float32 else autocast_dtype,
            group=None,
            peers=_peers(world, stages),
            hosts=_hosts(world.world_size, stages),
            compression=world.compression,
            extra_modules=tuple(extra_modules),
            activation_checkpointing=activation_checkpointing,
            loss_scale=LossScale() if autocast_dtype == torch.float16 else None,
        )

    def enter(self, rank: int, world_size: int) -> None:
        """Apply the layout of another round; only possible without stages."""
        assert self.stages == 1, "stages are replaced, not continued in place"
        self.rank = self.replica = rank
        self.replicas = world_size
        self.hosts = _hosts(world_size, 1)
        self._share = None

    def make_checkpointing(self, blocks: Mapping[str, nn.Module]) -> ActivationCheckpointing:
        """Return the activation checkpointing of these blocks, or of none if it is disabled."""
        return ActivationCheckpointing(blocks if self.activation_checkpointing else {}, self.device)

    @property
    def share(self) -> ReplicaShare:
        """This rank's part of a batch."""
        if self._share is None:
            self._share = ReplicaShare(self.microbatches, self.hosts, self.replica)
        return self._share

    def loader_options(self) -> dict[str, Any]:
        """Return the arguments that determine this rank's part of a batch in the loader."""
        return {
            "microbatches": self.microbatches,
            "replicas": self.replicas,
            "replica": self.replica,
            "hosts": self.hosts,
            "rank": self.rank,
        }

    def split(self, batch: Any) -> Batch:
        """Return this rank's part of a batch from a loader, or of a whole batch.

        A whole batch is hashed if there are other ranks to compare it with, or a record.
        """
        if isinstance(batch, Batch):
            return batch.for_share(self.share)
        part = split_batch(batch, self.share)
        if self.replicas * self.stages == 1 and not self.is_recorded:
            return part
        return replace(part, identity=BatchIdentity(checksum=hash_content(batch)))

    def other_modules(self) -> dict[str, nn.Module]:
        """Return the other modules that a step calls, by the names of the Trainer's arguments."""
        return self.named_extra_modules() | (
            {"loss": self.loss} if isinstance(self.loss, nn.Module) else {}
        )

    def named_extra_modules(self) -> dict[str, nn.Module]:
        """Return `extra_modules`, each by its position: several may be of one class."""
        return {f"extra_modules[{number}]": each for number, each in enumerate(self.extra_modules)}

    def modules_with(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the model and all other modules that a step calls, by their names in messages."""
        return {"": model} | self.named_extra_modules() | self.loss_module()

    def loss_module(self) -> dict[str, nn.Module]:
        """Return the loss by its class name, if it is a module."""
        return {type(self.loss).__name__: self.loss} if isinstance(self.loss, nn.Module) else {}

    def weigh(self, microbatch: Microbatch, place: str) -> float:
        """Return the weight of a micro-batch in the loss; `place` is for messages."""
        assert self.loss_weight is not None
        with CollectiveCallGuard(lambda: place):
            return float(self.loss_weight(microbatch.data))

    def make_buffer_exchange(self) -> GroupExchange:
        """Return the exchange of the ranks that hold the same buffers."""
        return GroupExchange(self.peers)

    def place(self, step: int, microbatch: int) -> str:
        """Return the rank, the step and the micro-batch, for messages."""
        return f"rank {self.rank}, step {step}, micro-batch {microbatch}"

    def autocast(self) -> Any:
        """Return the autocast context for `autocast_dtype`.

        Its cache is disabled, since a cached weight would connect the next micro-batch to the
        graph of the first.
        """
        if self.autocast_dtype is None:
            return NOTHING
        return torch.autocast(self.device.type, dtype=self.autocast_dtype, cache_enabled=False)

    def without_autocast(self) -> Any:
        """Return the context of a backward pass, which computes in the dtypes of forward."""
        if not torch.is_autocast_enabled(self._device_type):
            return NOTHING
        return torch.autocast(self._device_type, enabled=False)

    def move_to_device(self, data: Any) -> Any:
        """Return nested data with its tensors on this rank's device."""
        if self._device_type == "cpu":
            return data
        kinds = (torch.Tensor, PackedSequence)  # the sizes in the latter stay on the CPU
        return map_tensors(lambda part: part.to(self.device, non_blocking=True), data, kinds)


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


def _hosts(ranks: int, stages: int) -> Hosts:
    """Return the replicas of each host; a replica belongs to the host of its first rank."""
    group = backend.host_group_of(None) if dist.is_initialized() else None
    if group is None:
        return on_one_host(ranks // stages)
    found: dict[int, list[int]] = {}
    for replica in range(ranks // stages):
        found.setdefault(group.map.host_of(replica * stages), []).append(replica)
    return tuple(tuple(replicas) for replicas in found.values())


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
