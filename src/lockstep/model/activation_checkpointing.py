"""Recomputation: a block's activations are computed again in backward, not kept until then.

    forward     x ──> block 0 ──x1──> block 1 ──x2──> block 2 ──> loss      kept: x, x1, x2
    backward    block 2 again from x2, its backward; block 1 again from x1, ...

Also called activation checkpointing (Chen et al., 2016). A block costs a second forward
and holds its activations for its own backward only. Its second forward repeats the first
to the bit, and nobody sees that it took place:

    inputs        are kept; of one that the block writes into, a copy that lies as it lay
    generators    torch's, Python's and numpy's: as the block found them; then given back
    buffers       as the block found them, in copies: batch norm counts a micro-batch once
    autocast      as it was

torch's own `checkpoint` does the work, without reentrance: autograd's graph, and so the
order of its sums, is the one without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint

from lockstep.errors import LayoutError, UsageError
from lockstep.model.buffers import Buffers
from lockstep.randomness import isolated, remembered

__all__ = ["Recomputation", "check_blocks"]

ALIGNMENT = 64

Forward = Callable[..., Any]


class Recomputation:
    """The blocks that are recomputed, by name; none where nobody asked for it."""

    def __init__(self, blocks: Mapping[str, nn.Module], device: torch.device) -> None:
        self._names = {block: name for name, block in reversed(list(blocks.items()))}
        self._device = device
        self._written: dict[nn.Module, frozenset[int]] = {}
        """Which of its inputs a block writes into, as its first call showed."""
        self._repeated: nn.Module | None = None

    @contextmanager
    def active(self, buffers: Buffers) -> Iterator[None]:
        """Recompute every block in backward while the body runs; `buffers` are the step's."""
        with ExitStack() as stack:
            for block in self._names:
                forward = partial(self._called, block, block.forward, buffers)
                stack.enter_context(_replaced(block, forward))
            yield

    @contextmanager
    def told(self) -> Iterator[None]:
        """Raise UsageError by the block's name where a backward finds that one does not repeat."""
        try:
            yield
        except RuntimeError as error:
            if self._names and isinstance(error, CheckpointError):
                raise UsageError(
                    f"{self._block(self._repeated)} computed something else when it was "
                    "recomputed: its forward may depend on its inputs, parameters, buffers and "
                    "random numbers, not on what it counts itself; change that, or train without "
                    "activation_checkpointing=True"
                ) from error
            if self._names and "modified by an inplace operation" in str(error):
                raise UsageError(
                    "a tensor that backward needs was overwritten in place; with "
                    "activation_checkpointing=True that may be an input that a block also returned "
                    f"and a later block writes into: let that block write into a copy ({error})"
                ) from error
            raise

    def _called(
        self, block: nn.Module, forward: Forward, buffers: Buffers, *args: Any, **kwargs: Any
    ) -> Any:
        """Do the block's forward, so that backward repeats it."""
        if not torch.is_grad_enabled() or self._keeps_less(block):
            return forward(*args, **kwargs)
        found, structure = tree_flatten((args, kwargs))
        numbers = {key: number for number, key in enumerate(dict.fromkeys(map(id, found)))}
        order = [numbers[id(each)] for each in found]
        given = list({id(each): each for each in found}.values())
        versions = [_version(each) for each in given]
        first = [(args, kwargs)]  # the first call takes it: nothing may hold what it writes into
        restore, seen = remembered(self._device, everything=True), buffers.seen_by(block)

        def run(*kept: Any) -> Any:
            if first:
                args, kwargs = first.pop()
                return forward(*args, **kwargs)
            self._repeated = block
            copies = self._copied(block, kept)
            again = tree_unflatten([copies[number] for number in order], structure)
            with isolated(self._device, everything=True), buffers.again(seen):
                restore()
                return forward(*again[0], **again[1])

        kept = self._copied(block, given)
        result = checkpoint(run, *kept, use_reentrant=False, preserve_rng_state=False)
        self._note(block, given, versions)
        return result

    def _keeps_less(self, block: nn.Module) -> bool:
        """Tell whether a block, such as a ReLU in place, keeps its result where its input was.

        The next block keeps that anyway, and a copy of the input would come on top.
        """
        return bool(self._written.get(block)) and next(block.parameters(), None) is None

    def _copied(self, block: nn.Module, given: Sequence[Any]) -> list[Any]:
        """Return what a block is given, with copies of what it may write into."""
        written = self._written.get(block, range(len(given)))
        return [_copy(each) if number in written else each for number, each in enumerate(given)]

    def _note(self, block: nn.Module, given: Sequence[Any], before: Sequence[int]) -> None:
        """Note which inputs a block wrote into; UsageError where its copies do not help."""
        changed = [n for n, each in enumerate(given) if _version(each) != before[n]]
        known = self._written.setdefault(block, frozenset(changed))
        memory = {given[number].untyped_storage().data_ptr() for number in changed}
        if not known.issuperset(changed):
            raise UsageError(
                f"{self._block(block)} writes into an input that its first call did not write "
                "into: with activation_checkpointing=True it must do so in every call, or in none"
            )
        if len(memory) < len(changed):
            raise UsageError(
                f"{self._block(block)} writes into an input that shares its memory with another "
                "one: with activation_checkpointing=True give it a copy (.clone()) of one of them"
            )

    def _block(self, block: nn.Module | None) -> str:
        return "a block" if block is None else f"block {self._names[block]}"


def check_blocks(model: nn.Module, names: Sequence[str]) -> None:
    """Raise LayoutError for a model whose blocks cannot be recomputed one by one."""
    if hasattr(model, "_orig_mod"):
        raise LayoutError(
            "activation_checkpointing=True recomputes block by block, and a compiled model is one "
            "piece: compile its blocks one by one instead"
        )
    if not names:
        raise LayoutError(
            f"activation_checkpointing=True recomputes block by block, and {type(model).__name__} "
            "names no blocks: give a torch.nn.Sequential, a method blocks(), or "
            "PipelineConfig(blocks=[...]) with the modules that its forward calls"
        )


@contextmanager
def _replaced(block: nn.Module, forward: Forward) -> Iterator[None]:
    """Let a module have another forward, in the place of the class's or of one of its own."""
    own = vars(block).get("forward")
    vars(block)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(block)["forward"]
        else:
            vars(block)["forward"] = own


def _version(value: Any) -> int:
    """Return a number that changes when a tensor is written into."""
    return value._version if isinstance(value, torch.Tensor) else 0


def _copy(value: Any) -> Any:
    """Return a copy of a tensor, with its history, strides and distance from a 64-byte boundary.

    What no operation can write into, such as an expanded tensor, is returned itself.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    if not value.numel() or 0 in value.stride():
        return value
    size = value.element_size()
    offset = value.data_ptr() % ALIGNMENT // size
    span = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    memory = torch.empty(offset + span, dtype=value.dtype, device=value.device)
    copy = torch.empty(0, dtype=value.dtype, device=value.device)
    with torch.no_grad():
        copy.set_(memory.untyped_storage(), offset, value.shape, value.stride())
    return copy.copy_(value)
