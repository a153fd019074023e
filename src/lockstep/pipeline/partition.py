"""The partition of a model into pipeline stages.

    blocks      0    1    2    3    4         fixed by the model; each is a unit of random numbers
    stages     [0    1    2] [3    4]         measured, or given by the user; does not affect bits
    holders     w0: [0]   w4: [1]   tied: [0, 1]

The first stage that holds a parameter owns it: its gradients are summed there. Tensors that
belong to no block belong to stage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.errors import LayoutError

__all__ = ["Blocks", "Partition", "find_block_names", "is_sequence"]

Blocks = str | Sequence[str | nn.Module] | None
"""The blocks of a model: attribute paths or modules; None if the model names them itself."""


def find_block_names(model: nn.Module, blocks: Blocks) -> list[str]:
    """Return the names of a model's blocks in order; an empty list if it has none.

    The model's forward must be equivalent to calling the blocks one after another, each with
    the output of the previous one.

    Args:
        model: The model.
        blocks: The blocks. An `nn.ModuleList` or `nn.Sequential` among them stands for its
            children. If None, the result of the model's method `blocks()`, or the children of
            an `nn.Sequential`.

    Raises:
        LayoutError: A name or module is not in the model.
    """
    if blocks is None:
        method = None if type(model) is nn.Sequential else getattr(model, "blocks", None)
        if not callable(method) or isinstance(method, nn.Module):
            return list(model._modules) if is_sequence(model) else []
        blocks = list(method())
    given = [blocks] if isinstance(blocks, (str, nn.Module)) else list(blocks)
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return [each for item in given for each in _expand(_find_name(item, model, names), model)]


def is_sequence(model: nn.Module) -> bool:
    """Return whether a model is an `nn.Sequential`, or a subclass that calls its children alike."""
    kind = type(model)
    return (
        isinstance(model, nn.Sequential)
        and kind.forward is nn.Sequential.forward
        and kind.__call__ is nn.Module.__call__
        and getattr(kind, "__iter__", None) is nn.Sequential.__iter__
        and "forward" not in vars(model)
    )


def _find_name(item: str | nn.Module, model: nn.Module, names: dict[int, list[str]]) -> str:
    """Return the name of a block; a module that is listed several times gets its next name."""
    kind = type(model).__name__
    if isinstance(item, nn.Module):
        if id(item) not in names:
            raise LayoutError(f"blocks: the {type(item).__name__} is not part of the model {kind}")
        found = names[id(item)]
        return found.pop(0) if len(found) > 1 else found[0]
    try:
        model.get_submodule(item)
    except AttributeError:
        raise LayoutError(f"blocks: the model {kind} has no module {item!r}") from None
    return item


def _expand(name: str, model: nn.Module) -> list[str]:
    """Return the name of a block, or the names of the children of a container."""
    module = model.get_submodule(name)
    if type(module) in (nn.Sequential, nn.ModuleList):
        return [f"{name}.{child}" if name else child for child in module._modules]
    return [name]


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
