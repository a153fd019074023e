"""Awakening: blocks that are given as factories, or on the meta device, come to life.

    factories    [make_0, make_1, ...]      called on the rank that needs the block
    meta         modules without memory     get it, and reset their parameters

    elsewhere    a factory is called under torch.device("meta"): names and shapes, no memory

Block b draws from key(seed, b), so that its first weights depend neither on the rank
where it is built nor on which other blocks are built there.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.model.meta_device import materialize, moved, release, tensors_of
from lockstep.randomness import isolated, key, seed_all

__all__ = ["BlockLike", "Blocks", "awaken", "build", "build_sequence"]

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
    if isinstance(blocks, Sequence):
        return build_sequence(blocks, range(len(blocks)), seed, device)
    return awaken(blocks, seed, 0, device)


def build_sequence(
    blocks: Sequence[BlockLike],
    held: Collection[int],
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> nn.Sequential:
    """Return the sequence of `blocks`, of which those that are `held` come to life here.

    The others are on the meta device, unless they were given with weights. Blocks on the
    meta device that share tensors come to life together: the first one draws them.
    """
    here = range(len(blocks)) if _sharing(blocks) else held
    alive = {number: awaken(blocks[number], seed, number, device) for number in here}
    used = {id(tensor) for block in alive.values() for tensor in tensors_of(block).values()}
    return nn.Sequential(
        *(
            alive[number] if number in alive else _asleep(block, seed, number, device, used)
            for number, block in enumerate(blocks)
        )
    )


def awaken(
    block: BlockLike, seed: int, number: int, device: str | torch.device = "cpu"
) -> nn.Module:
    """Return block `number`, in memory on `device`; the generators are left as they were."""
    with isolated(everything=True), torch.device(device):
        seed_all(key(seed, number))
        made = _made(block, number)
        if any(tensor.is_meta for tensor in tensors_of(made).values()):
            _reset(made, number, device)
    return made.to(device)


def _asleep(
    block: BlockLike, seed: int, number: int, device: str | torch.device, used: Collection[int]
) -> nn.Module:
    """Return block `number` without memory but for the tensors, by id, that are `used` here.

    A factory that cannot do without memory is given it, and the block is let go of at once.
    """
    if isinstance(block, nn.Module):
        return moved(block, device)
    try:
        with isolated(everything=True), warnings.catch_warnings(), torch.device("meta"):
            seed_all(key(seed, number))  # for attributes that are drawn: they are compared
            # A factory that loads weights hears of each one that a meta tensor takes none.
            warnings.filterwarnings("ignore", ".*from a non-meta parameter", UserWarning)
            made = _made(block, number)
    except Exception:  # whatever a factory cannot do on the meta device; its own fault comes again
        made = awaken(block, seed, number, device)
    kept = {name for name, tensor in tensors_of(made).items() if id(tensor) in used}
    release(made, kept.__contains__)
    return made


def _made(block: BlockLike, number: int) -> nn.Module:
    made = block if isinstance(block, nn.Module) else block()
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"block {number} is a {type(made).__name__}: give modules, or callables without "
            "arguments that return one"
        )
    return made


def _sharing(blocks: Sequence[BlockLike]) -> bool:
    """Tell whether a tensor on the meta device is in several of the blocks."""
    given = [block for block in blocks if isinstance(block, nn.Module)]
    tensors = [tensor for block in given for tensor in tensors_of(block).values()]
    uses = Counter(id(tensor) for tensor in tensors if tensor.is_meta)
    return any(count > 1 for count in uses.values())


def _reset(module: nn.Module, number: int, device: str | torch.device) -> None:
    """Give memory to what is on the meta device, and let those parts draw their weights."""
    lacking = [
        (name, part)
        for name, part in module.named_modules()
        if any(each.is_meta for each in [*part.parameters(False), *part.buffers(False)])
    ]
    materialize(module, device)
    for name, part in lacking:
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        if reset is None:
            where = f"{name} of block {number}" if name else f"block {number}"
            raise UsageError(
                f"{where}, a {type(part).__name__}, is on the meta device and has no method "
                "reset_parameters() to give it weights: give a callable that builds the block"
            )
        reset()
