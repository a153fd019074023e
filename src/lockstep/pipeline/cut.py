"""The cut: a model in blocks, the blocks in stages, and which stage needs which parameter.

    blocks      0    1    2    3    4         fixed by the model; each is a unit of random numbers
    stages     [0    1    2] [3    4]         found by measurement, or given; changes no bit
    holders     w0: (0,)   w4: (1,)   tied: (0, 1)

The first of a parameter's holders owns it: there its gradients are added. What no
block has belongs to stage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.errors import LayoutError

__all__ = ["Blocks", "Cut", "block_names"]

Blocks = str | Sequence[str | nn.Module] | None
"""How a model's blocks are given: attribute paths or modules; None where it names them itself."""


def block_names(model: nn.Module, blocks: Blocks) -> list[str]:
    """Return the names of a model's blocks in order; none where it is one piece.

    The blocks, each called with what the one before returned, must make up the
    model's forward. They are the children of an `nn.Sequential`, or what the model's
    method `blocks()` returns, or what is given. An `nn.ModuleList` or `nn.Sequential`
    among those that are given stands for its children.

    Raises LayoutError where a name or module is not in the model.
    """
    if blocks is None:
        if type(model) is nn.Sequential:
            return [name for name, _ in model._modules.items()]
        method = getattr(model, "blocks", None)
        if not callable(method) or isinstance(method, nn.Module):
            return []
        blocks = list(method())
    given = [blocks] if isinstance(blocks, (str, nn.Module)) else list(blocks)
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return [each for item in given for each in _opened(_name(item, model, names), model)]


def _name(item: str | nn.Module, model: nn.Module, names: dict[int, list[str]]) -> str:
    """Return a block's name: of a module that is given several times, the next of its names."""
    kind = type(model).__name__
    if isinstance(item, nn.Module):
        if id(item) not in names:
            raise LayoutError(
                f"blocks: a {type(item).__name__} that is given is no part of the model {kind}"
            )
        found = names[id(item)]
        return found.pop(0) if len(found) > 1 else found[0]
    try:
        model.get_submodule(item)
    except AttributeError:
        raise LayoutError(f"blocks: the model {kind} has no module {item!r}") from None
    return item


def _opened(name: str, model: nn.Module) -> list[str]:
    module = model.get_submodule(name)
    if type(module) in (nn.Sequential, nn.ModuleList):
        return [f"{name}.{child}" if name else child for child in module._modules]
    return [name]


@dataclass(frozen=True)
class Cut:
    """The blocks' names, and for every stage the range of its blocks."""

    names: tuple[str, ...]
    ranges: tuple[range, ...]

    def blocks(self, model: nn.Module, stage: int) -> list[nn.Module]:
        """Return the modules of one stage, in `model` or a copy of it."""
        span = self.ranges[stage]
        return [model.get_submodule(name) for name in self.names[span.start : span.stop]]

    def stages_of(self, model: nn.Module, which: Callable[[nn.Module], Iterable[Any]]) -> Any:
        """Return for every tensor (by id) the ascending stages whose blocks have it."""
        found: dict[int, list[int]] = {}
        for stage in range(len(self.ranges)):
            for tensor in {id(t): t for b in self.blocks(model, stage) for t in which(b)}:
                found.setdefault(tensor, []).append(stage)
        return found

    def holders(self, model: nn.Module) -> dict[str, list[int]]:
        """Return for every parameter and buffer, by its first name, the stages that have it.

        Raises LayoutError for a buffer, or a block within a block, on several stages.
        """
        parameters = self.stages_of(model, nn.Module.parameters)
        buffers = self.stages_of(model, nn.Module.buffers)
        found = {name: parameters.get(id(t), [0]) for name, t in model.named_parameters()}
        for name, tensor in model.named_buffers():
            found[name] = buffers.get(id(tensor), [0])
            if len(found[name]) > 1:
                raise LayoutError(
                    f"buffer {name} belongs to blocks of the stages {found[name]}, and each would "
                    "write its own: choose a balance that keeps these blocks in one stage"
                )
        self._check_nesting(model)
        return found

    def _check_nesting(self, model: nn.Module) -> None:
        inside = self.stages_of(model, lambda block: list(block.modules())[1:])
        for number, name in enumerate(self.names):
            stage = next(s for s, span in enumerate(self.ranges) if number in span)
            others = inside.get(id(model.get_submodule(name)), [stage])
            if others != [stage]:
                raise LayoutError(
                    f"block {name} of stage {stage} is also called inside a block of stage "
                    f"{others[0]}: choose a balance that keeps both in one stage"
                )
