"""The placement of the parts of a partitioned model on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lockstep.comm.sparse_gradients import sparse_weights
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.kernel.rng_scopes import RngScopes, find_scopes
from lockstep.model.native_seeder import make_rng_scopes
from lockstep.model.parallel_context import ParallelContext
from lockstep.pipeline.partition import Partition
from lockstep.pipeline.pipeline import Pipeline
from lockstep.pipeline.python_state import find_python_states
from lockstep.pipeline.stage import Stage
from lockstep.pipeline.tied_weights import find_tied_parameters

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """The stages that hold each tensor of a model, and the stages on this rank.

    Attributes:
        parallel: The layout.
        partition: The blocks of each stage.
        holders: The stages that hold each parameter and buffer, under each of its names.
    """

    parallel: ParallelContext
    partition: Partition
    holders: Mapping[str, Sequence[int]]

    @classmethod
    def from_model(
        cls, parallel: ParallelContext, partition: Partition, model: nn.Module
    ) -> Placement:
        """Return the placement of a whole model."""
        first = partition.find_holders(model)
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        names |= {id(tensor): name for name, tensor in model.named_buffers()}
        every = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        holders = {name: first[names[id(tensor)]] for name, tensor in every}
        return cls(parallel, partition, holders)

    @property
    def stages(self) -> range:
        """The numbers of the stages on this rank."""
        return range(self.parallel.position, len(self.partition.ranges), self.parallel.stages)

    def is_local(self, name: str) -> bool:
        """Return whether this rank holds a tensor of the model."""
        return any(stage in self.stages for stage in self.holders[name])

    def is_owned(self, name: str) -> bool:
        """Return whether this rank owns a tensor: every tensor has one owner per replica."""
        return self.holders[name][0] in self.stages

    def find_owner(self, name: str) -> int:
        """Return the rank of replica 0 that owns a tensor."""
        return self.holders[name][0] % self.parallel.stages

    def build_pipeline(
        self,
        model: nn.Module,
        seed: int,
        schedule: str,
        stages_per_rank: int,
    ) -> Pipeline:
        """Build this rank's stages, and connect them to their neighbors."""
        parameters, sparse = dict(model.named_parameters()), sparse_weights(model.modules())
        blocks = [self.select_blocks(model, number) for number in range(len(self.partition.ranges))]
        states = find_python_states(blocks, self.parallel.loss, model)
        stages = [
            Stage(
                number,
                blocks[number],
                self.make_units(model, number, seed),
                GradientReducer(
                    [pair for pair in parameters.items() if self.holders[pair[0]][0] == number],
                    self.parallel.peers,
                    sparse=sparse,
                    compression=self.parallel.compression,
                ),
                self.parallel.make_checkpointing(blocks[number]),
                self.parallel.device,
                states[number],
                len(self.stages) > 1,
            )
            for number in self.stages
        ]
        return Pipeline(
            self.parallel,
            stages,
            schedule,
            stages_per_rank,
            find_tied_parameters(parameters, self.holders),
        )

    def select_blocks(self, model: nn.Module, stage: int) -> dict[str, nn.Module]:
        """Return a stage's blocks by name, in `model` or a copy of it."""
        span = self.partition.ranges[stage]
        names = self.partition.block_names[span.start : span.stop]
        return {name: model.get_submodule(name) for name in names}

    def make_units(self, model: nn.Module, stage: int, seed: int) -> RngScopes:
        """Return the units of random numbers of a stage, in `model` or a copy of it."""
        units = find_scopes(model, self.partition.block_names)
        begin = self.partition.ranges[stage].start
        before = [model.get_submodule(name) for name in self.partition.block_names[:begin]]
        counts = [sum(each is unit for each in before) for unit in units]
        here = set(self.select_blocks(model, stage).values())
        return make_rng_scopes(
            [unit if unit in here else None for unit in units],
            None,
            seed,
            self.parallel.device,
            counts,
        )
