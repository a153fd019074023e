"""The placement: this rank's stages, made of the whole model and a cut of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.units import Units, units_of
from lockstep.pipeline.cut import Cut
from lockstep.pipeline.pipeline import Pipeline
from lockstep.pipeline.python_state import python_states
from lockstep.pipeline.stage import Stage
from lockstep.pipeline.tied_weights import ties_of

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """Which stages have a tensor of the model, and which of them are here.

    `holders` has an entry for every parameter and buffer, under each of its names.
    """

    parallel: ParallelContext
    cut: Cut
    holders: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, parallel: ParallelContext, cut: Cut, model: nn.Module) -> Placement:
        """Return the placement of a model that is whole."""
        first = cut.holders(model)
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        names |= {id(tensor): name for name, tensor in model.named_buffers()}
        every = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        return cls(parallel, cut, {name: first[names[id(tensor)]] for name, tensor in every})

    @property
    def stages(self) -> range:
        """The numbers of the stages on this rank."""
        return range(self.parallel.position, len(self.cut.ranges), self.parallel.stages)

    def here(self, name: str) -> bool:
        """Tell whether a tensor of the model is needed on this rank."""
        return any(stage in self.stages for stage in self.holders[name])

    def owned(self, name: str) -> bool:
        """Tell whether this rank owns a tensor: every tensor has one owner in a replica."""
        return self.holders[name][0] in self.stages

    def source(self, name: str) -> int:
        """Return the rank of replica 0 that owns a tensor."""
        return self.holders[name][0] % self.parallel.stages

    def pipeline(
        self, model: nn.Module, seed: int, schedule: str, stages_per_rank: int
    ) -> Pipeline:
        """Make this rank's stages and link them with the others."""
        parameters = dict(model.named_parameters())
        blocks = [self.named(model, number) for number in range(len(self.cut.ranges))]
        states = python_states(blocks, self.parallel.loss)
        stages = [
            Stage(
                number,
                blocks[number],
                self.units(model, number, seed),
                GradientReducer(
                    [pair for pair in parameters.items() if self.holders[pair[0]][0] == number],
                    self.parallel.peers,
                ),
                self.parallel.recomputation(blocks[number]),
                self.parallel.device,
                states[number],
            )
            for number in self.stages
        ]
        return Pipeline(
            self.parallel, stages, schedule, stages_per_rank, ties_of(parameters, self.holders)
        )

    def named(self, model: nn.Module, stage: int) -> dict[str, nn.Module]:
        """Return a stage's blocks by name, in `model` or a copy of it."""
        span = self.cut.ranges[stage]
        names = self.cut.names[span.start : span.stop]
        return {name: model.get_submodule(name) for name in names}

    def units(self, model: nn.Module, stage: int, seed: int) -> Units:
        """Return the keys of a stage's random numbers, in `model` or a copy of it."""
        units = units_of(model, self.cut.names)
        begin = self.cut.ranges[stage].start
        before = [model.get_submodule(name) for name in self.cut.names[:begin]]
        counts = [sum(each is unit for each in before) for unit in units]
        here = set(self.named(model, stage).values())
        return Units(
            [unit if unit in here else None for unit in units],
            None,
            seed,
            self.parallel.device,
            counts,
        )
