"""Awakening: blocks that are given as factories, or on the meta device, come to life.

    factories    [make_0, make_1, ...]      called on the rank that needs the block
    meta         modules without memory     get it, and reset their parameters

Block b draws from key(seed, b), so that its first weights depend neither on the rank
where it is built nor on which other blocks are built there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.randomness import isolated, key, seed_all

__all__ = ["BlockLike", "Blocks", "awaken", "build"]

BlockLike = nn.Module | Callable[[], nn.Module]
Blocks = BlockLike | Sequence[BlockLike]


def build(blocks: Blocks, seed: int = 0, device: str | torch.device = "cpu") -> nn.Module:
    """Return the model that `blocks` make up, with the same first weights everywhere.

    `blocks` is a list of modules or of callables that return one, which become an
    `nn.Sequential`, or one of either, which becomes the model itself. What is on the
    meta device gets memory and resets its parameters; what has weights keeps them.

    Raises UsageError for a factory that returns no module, and for a module on the meta
    device with parameters that it cannot reset.
    """
    if isinstance(blocks, Sequence) and not isinstance(blocks, nn.Module):
        made = [awaken(block, seed, number, device) for number, block in enumerate(blocks)]
        return nn.Sequential(*made)
    return awaken(blocks, seed, 0, device)


def awaken(
    block: BlockLike, seed: int, number: int, device: str | torch.device = "cpu"
) -> nn.Module:
    """Return block `number`, in memory on `device`; the generators are left as they were."""
    with isolated(everything=True), torch.device(device):
        seed_all(key(seed, number))
        made = block if isinstance(block, nn.Module) else block()
        if not isinstance(made, nn.Module):
            raise UsageError(
                f"block {number} is a {type(made).__name__}: give modules, or callables without "
                "arguments that return one"
            )
        if any(tensor.is_meta for tensor in _tensors(made)):
            _materialize(made, number, device)
    return made.to(device)


def _materialize(module: nn.Module, number: int, device: str | torch.device) -> None:
    module.to_empty(device=device)
    for name, part in module.named_modules():
        if not any(True for _ in _tensors(part, recurse=False)):
            continue
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        if reset is None:
            where = f"{name} of block {number}" if name else f"block {number}"
            raise UsageError(
                f"{where}, a {type(part).__name__}, is on the meta device and has no method "
                "reset_parameters() to give it weights: give a callable that builds the block"
            )
        reset()


def _tensors(module: nn.Module, recurse: bool = True) -> list[torch.Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]
