"""The partition of a model into pipeline stages.

    blocks      0    1    2    3    4         fixed by the model; each is a unit of random numbers
    stages     [0    1    2] [3    4]         measured, or given by the user; does not affect bits
    holders     w0: [0]   w4: [1]   tied: [0, 1]

The first stage that holds a parameter owns it: its gradients are summed there. Tensors that
belong to no block belong to stage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.kernel.errors import LayoutError

__all__ = ["Partition"]


@dataclass(frozen=True)
class Partition:
    """The names of all blocks, and the range of blocks of each stage."""

    block_names: tuple[str, ...]
    ranges: tuple[range, ...]

    def select_blocks(self, model: nn.Module, stage: int) -> list[nn.Module]:
        """Return the modules of one stage, in `model` or a copy of it."""
        span = self.ranges[stage]
        return [model.get_submodule(name) for name in self.block_names[span.start : span.stop]]

    def find_stages(
        self, model: nn.Module, select: Callable[[nn.Module], Iterable[Any]]
    ) -> dict[int, list[int]]:
        """Return, by the id of each object, the stages whose blocks contain it, ascending.

        Args:
            model: The model.
            select: A function that returns the objects of one block, such as its parameters.
        """
        found: dict[int, list[int]] = {}
        for stage in range(len(self.ranges)):
            blocks = self.select_blocks(model, stage)
            for key in dict.fromkeys(id(each) for block in blocks for each in select(block)):
                found.setdefault(key, []).append(stage)
        return found

    def find_holders(self, model: nn.Module) -> dict[str, list[int]]:
        """Return the stages that hold each parameter and buffer, by its first name.

        Raises:
            LayoutError: A buffer, or a block within a block, belongs to several stages.
        """
        parameters = self.find_stages(model, nn.Module.parameters)
        buffers = self.find_stages(model, nn.Module.buffers)
        found = {name: parameters.get(id(each), [0]) for name, each in model.named_parameters()}
        for name, tensor in model.named_buffers():
            found[name] = buffers.get(id(tensor), [0])
            if len(found[name]) > 1:
                raise LayoutError(
                    f"buffer {name} belongs to blocks of the stages {found[name]}, and each stage "
                    "would update its own copy: choose a balance that keeps these blocks in one "
                    "stage"
                )
        self._check_nesting(model)
        return found

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
