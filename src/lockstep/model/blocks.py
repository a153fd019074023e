"""Blocks: the parts of a model that its forward calls one after another.

They are the RNG scopes (`lockstep.kernel.rng_scopes`), and pipeline stages consist of whole blocks
(`lockstep.pipeline.partition`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lockstep.kernel.errors import LayoutError
from lockstep.model.compilation import check_blocks_of, is_compiled

__all__ = ["BlockSequence", "Blocks", "find_block_names", "is_sequence"]

Blocks = str | Sequence[str | nn.Module] | None
"""The blocks of a model: attribute paths or modules; None if the model names them itself."""


class BlockSequence(nn.Sequential):
    """The model that a list of blocks becomes: its first block may take several inputs."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the last block."""
        blocks = iter(self)
        value = next(blocks)(*inputs, **named)
        for block in blocks:
            value = block(value)
        return value


def find_block_names(model: nn.Module, blocks: Blocks) -> list[str]:
    """Return the names of a model's blocks in order; an empty list if it has none.

    The model's forward must be equivalent to calling the blocks one after another, each with
    the output of the previous one. A compiled model has no blocks: it calls them inside of a graph.

    Args:
        model: The model.
        blocks: The blocks. An `nn.ModuleList` or `nn.Sequential` among them stands for its
            children. If None, the result of the model's method `blocks()`, or the children of
            an `nn.Sequential`.

    Raises:
        LayoutError: A name or module is not in the model, or is a part of a compiled module.
    """
    if is_compiled(model):
        return []
    if blocks is None:
        method = None if type(model) is nn.Sequential else getattr(model, "blocks", None)
        if not callable(method) or isinstance(method, nn.Module):
            return list(model._modules) if is_sequence(model) else []
        blocks = list(method())
    given = [blocks] if isinstance(blocks, (str, nn.Module)) else list(blocks)
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    block_names = [
        name for item in given for name in _expand(_find_name(item, model, names), model)
    ]
    check_blocks_of(model, block_names)
    return block_names


def is_sequence(model: nn.Module) -> bool:
    """Return whether a model is an `nn.Sequential`, or a subclass that calls its children alike."""
    kind = type(model)
    return (
        isinstance(model, nn.Sequential)
        and kind.forward in (nn.Sequential.forward, BlockSequence.forward)
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
        registered = names[id(item)]
        return registered.pop(0) if len(registered) > 1 else registered[0]
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
