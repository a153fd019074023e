"""The partition of a model into pipeline stages, and their placement on ranks.

    blocks      0    1    2    3    4         fixed by the model; each is an RNG scope
    stages     [0    1    2] [3    4]         measured, or given by the user; does not affect bits
    held by     w0: [0]   w4: [1]   tied: [0, 1]

The first stage that holds a parameter owns it: its gradients are summed there. Tensors that
belong to no block belong to stage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.kernel.errors import LayoutError
from lockstep.kernel.rng_scopes import RngScopes, find_scopes
from lockstep.model.native_seeder import make_rng_scopes
from lockstep.model.parallel_context import ParallelContext

__all__ = ["Partition", "Placement"]


@dataclass(frozen=True)
class Partition:
    """The names of all blocks, and the range of blocks of each stage."""

    block_names: tuple[str, ...]
    ranges: tuple[range, ...]

    def select_blocks(self, model: nn.Module, stage: int) -> dict[str, nn.Module]:
        """Return the blocks of one stage by name, in `model` or a copy of it."""
        span = self.ranges[stage]
        names = self.block_names[span.start : span.stop]
        return {name: model.get_submodule(name) for name in names}

    def find_stages(
        self, model: nn.Module, select: Callable[[nn.Module], Iterable[Any]]
    ) -> dict[int, list[int]]:
        """Return, by the id of each object, the stages whose blocks contain it, ascending.

        Args:
            model: The model.
            select: A function that returns the objects of one block, such as its parameters.
        """
        stages: dict[int, list[int]] = {}
        for stage in range(len(self.ranges)):
            blocks = self.select_blocks(model, stage).values()
            for key in dict.fromkeys(id(part) for block in blocks for part in select(block)):
                stages.setdefault(key, []).append(stage)
        return stages

    def find_holders(self, model: nn.Module) -> dict[str, list[int]]:
        """Return the stages that hold each parameter and buffer, under each of its names.

        Raises:
            LayoutError: A buffer, or a block within a block, belongs to several stages.
        """
        parameters = self.find_stages(model, nn.Module.parameters)
        buffers = self.find_stages(model, nn.Module.buffers)
        stages_by_name = {
            name: parameters.get(id(parameter), [0])
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        for name, buffer in model.named_buffers(remove_duplicate=False):
            stages_by_name[name] = buffers.get(id(buffer), [0])
            if len(stages_by_name[name]) > 1:
                raise LayoutError(
                    f"buffer {name} belongs to blocks of the stages {stages_by_name[name]}, and "
                    "each stage would update its own copy: choose a balance that keeps these "
                    "blocks in one stage"
                )
        self._check_nesting(model)
        return stages_by_name

    def _check_nesting(self, model: nn.Module) -> None:
        inside = self.find_stages(model, lambda block: list(block.modules())[1:])
        for number, name in enumerate(self.block_names):
            stage = next(s for s, span in enumerate(self.ranges) if number in span)
            others = inside.get(id(model.get_submodule(name)), [stage])
            if others != [stage]:
                raise LayoutError(
                    f"block {name} of stage {stage} is also called inside a block of stage "
                    f"{others[0]}: choose a balance that keeps both in one stage"
                )


@dataclass(frozen=True)
class Placement:
    """The stages that hold each tensor of a model, and the stages on this rank.

    Attributes:
        parallel: The layout.
        partition: The blocks of each stage.
        stages_by_name: The stages that hold each parameter and buffer, under each of its names.
    """

    parallel: ParallelContext
    partition: Partition
    stages_by_name: Mapping[str, Sequence[int]]

    @classmethod
    def from_model(
        cls, parallel: ParallelContext, partition: Partition, model: nn.Module
    ) -> Placement:
        """Return the placement of a whole model."""
        return cls(parallel, partition, partition.find_holders(model))

    @property
    def stages(self) -> range:
        """The numbers of the stages on this rank."""
        return range(self.parallel.position, len(self.partition.ranges), self.parallel.stages)

    def is_local(self, name: str) -> bool:
        """Return whether this rank holds a tensor of the model."""
        return any(stage in self.stages for stage in self.stages_by_name[name])

    def is_owned(self, name: str) -> bool:
        """Return whether this rank owns a tensor: every tensor has one owner per replica."""
        return self.stages_by_name[name][0] in self.stages

    def find_owner(self, name: str) -> int:
        """Return the rank of replica 0 that owns a tensor."""
        return self.stages_by_name[name][0] % self.parallel.stages

    def make_scopes(self, model: nn.Module, stage: int, seed: int) -> RngScopes:
        """Return the RNG scopes of a stage, in `model` or a copy of it."""
        scopes = find_scopes(model, self.partition.block_names)
        begin = self.partition.ranges[stage].start
        before = [model.get_submodule(name) for name in self.partition.block_names[:begin]]
        counts = [sum(block is scope for block in before) for scope in scopes]
        here = set(self.partition.select_blocks(model, stage).values())
        return make_rng_scopes(
            [scope if scope in here else None for scope in scopes],
            None,
            seed,
            self.parallel.device,
            counts,
        )
