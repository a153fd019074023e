"""The parallel context: the layout, the loss and the arithmetic of a trainer's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from lockstep.data.assignment import Hosts, ReplicaShare, assign_nodes
from lockstep.data.content_hash import hash_content
from lockstep.data.microbatch import map_tensors, split_batch
from lockstep.kernel.batch import Batch, BatchIdentity, Microbatch
from lockstep.kernel.buffers import BufferExchange
from lockstep.kernel.errors import LayoutError
from lockstep.kernel.layout import Messages
from lockstep.kernel.loss_scale import LossScale
from lockstep.kernel.loss_weights import WeightFunction
from lockstep.kernel.step_context import NOTHING
from lockstep.kernel.tree import Node
from lockstep.model.activation_checkpointing import ActivationCheckpointing
from lockstep.model.collective_calls import CollectiveCallGuard
from lockstep.model.target_weights import find_ignored_count

__all__ = ["ParallelContext"]


# It has many attributes: the arguments of a trainer, and what each step or micro-batch asks of
# them.
@dataclass(eq=False)
class ParallelContext:
    """The layout, the loss and the arithmetic of a trainer, as seen by this rank.

    All parts of a trainer hold the same object. `loss_scale` changes between steps, equally on all
    ranks. `is_recorded` is set while steps are recorded or replayed: batches are hashed then. The
    layout changes only in `enter`, at the beginning of a round of an elastic run.
    `is_sharded` says that parameters are sharded, so that ranks take turns.
    """

    microbatches: int
    rank: int
    hosts: Hosts
    device: torch.device
    group: dist.ProcessGroup | None
    peers: dist.ProcessGroup | None
    messages: Messages
    make_buffer_exchange: Callable[[], BufferExchange]
    stages: int = 1
    threads: int = field(default_factory=torch.get_num_threads)
    loss: Callable[..., Any] | None = None
    loss_weight: WeightFunction | None = None
    autocast_dtype: torch.dtype | None = None
    extra_modules: tuple[nn.Module, ...] = ()
    activation_checkpointing: bool = False
    loss_scale: LossScale | None = None
    is_sharded: bool = False
    is_recorded: bool = False

    def __post_init__(self) -> None:
        """Keep what every step or micro-batch asks for."""
        self.device_type = self.device.type
        self.count_ignored = find_ignored_count(self.loss)
        self._spare: Microbatch | None = None  # see `take_turns`
        # The nodes that each rank holds in a step that others than the planned ranks complete.
        self.held_nodes: Sequence[Sequence[Node]] | None = None
        self._find_replica()

    def _find_replica(self) -> None:
        """Find this rank's replica, its stage there (`position`) and its part of a batch."""
        self.replicas = sum(map(len, self.hosts))
        self.replica, self.position = divmod(self.rank, self.stages)
        self.share = ReplicaShare(self.microbatches, self.hosts, self.replica, self.is_sharded)

    @property
    def has_parts(self) -> bool:
        """Whether ranks have different parts of the model."""
        return self.stages > 1 or self.is_sharded

    @property
    def part(self) -> tuple[int, int]:
        """The part of the state that this rank holds, and the number of parts."""
        if not self.is_sharded:
            return self.position, self.stages
        (ranks,) = (ranks for ranks in self.hosts if self.replica in ranks)
        return ranks.index(self.replica), len(ranks)

    def enter(self, rank: int, hosts: Hosts) -> None:
        """Apply the layout of another round; only possible without stages.

        Args:
            rank: The rank.
            hosts: The replicas of each host.
        """
        assert self.stages == 1, "stages are replaced, not continued in place"
        self.rank = rank
        self.hosts = hosts
        self._find_replica()

    def make_checkpointing(self, blocks: Mapping[str, nn.Module]) -> ActivationCheckpointing:
        """Return the activation checkpointing of these blocks, or of none if it is disabled."""
        return ActivationCheckpointing(blocks if self.activation_checkpointing else {}, self.device)

    def loader_options(self) -> dict[str, Any]:
        """Return the arguments that determine this rank's part of a batch in the loader."""
        return {
            "microbatches": self.microbatches,
            "replicas": self.replicas,
            "replica": self.replica,
            "hosts": self.hosts,
            "is_sharded": self.is_sharded,
            "rank": self.rank,
        }

    def split(self, batch: Any, share: ReplicaShare | None = None) -> Batch:
        """Return this rank's part of a batch from a loader, or of a whole batch.

        A whole batch is hashed if there are other ranks to compare it with, or a record.

        Args:
            batch: The batch.
            share: Which micro-batches; None: those of this rank.
        """
        share = share or self.share
        if isinstance(batch, Batch):
            return batch.for_share(share)
        part = split_batch(batch, share)
        if self.replicas * self.stages == 1 and not self.is_recorded:
            return part
        return replace(part, identity=BatchIdentity(checksum=hash_content(batch)))

    def assign_nodes(self, leaves: int) -> Sequence[Sequence[Node]]:
        """Return, for each replica, the nodes of the tree that cover its micro-batches."""
        if self.held_nodes is not None:
            return self.held_nodes
        return self.share.nodes(leaves) if self.is_sharded else assign_nodes(leaves, self.hosts)

    def take_turns(self, batch: Batch) -> Iterator[tuple[Microbatch, bool]]:
        """Yield the micro-batches to evaluate, and whether each one counts on this rank.

        All ranks call a sharded model as often: a rank without a micro-batch in the last turn
        repeats another one.

        Raises:
            LayoutError: The first batch has fewer micro-batches than there are ranks.
        """
        own = batch.microbatches
        turns = -(-batch.leaves // self.replicas) if self.is_sharded else len(own)
        if self._spare is None and self.is_sharded and self.replicas > 1:
            if batch.leaves < self.replicas:
                raise LayoutError(
                    f"a batch of {batch.size} samples cannot be evaluated by the {self.replicas} "
                    "ranks of a sharded model: pass a larger batch_size, or use fewer ranks"
                )
            self._spare = replace(own[0], data=map_tensors(torch.clone, own[0].data))
        for microbatch in own:
            yield microbatch, True
        for _ in range(len(own), turns):
            assert self._spare is not None
            yield self._spare, False

    def other_modules(self) -> dict[str, nn.Module]:
        """Return the other modules that a step calls, by the names of the Trainer's arguments."""
        return self.named_extra_modules() | (
            {"loss": self.loss} if isinstance(self.loss, nn.Module) else {}
        )

    def named_extra_modules(self) -> dict[str, nn.Module]:
        """Return `extra_modules`, each by its position: several may be of one class."""
        return {
            f"extra_modules[{number}]": module for number, module in enumerate(self.extra_modules)
        }

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
        if not torch.is_autocast_enabled(self.device_type):
            return NOTHING
        return torch.autocast(self.device_type, enabled=False)

    def move_to_device(self, data: Any) -> Any:
        """Return nested data with its tensors on this rank's device."""
        if self.device_type == "cpu":
            return data
        kinds = (torch.Tensor, PackedSequence)  # the sizes in the latter stay on the CPU
        return map_tensors(lambda part: part.to(self.device, non_blocking=True), data, kinds)
