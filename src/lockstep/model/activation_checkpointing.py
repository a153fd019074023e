"""Activation checkpointing: backward recomputes the activations of each block.

    forward     x ──> block 0 ──x1──> block 1 ──x2──> block 2 ──> loss      kept: x, x1, x2
    backward    block 2 again from x2, its backward; block 1 again from x1, ...

See Chen et al., 2016. A block with parameters costs a second forward, and holds its activations
only during its own backward. Other blocks, such as an activation in place, are computed once. The
second forward is bit-identical to the first and has no side effects:

    inputs        are kept; a block that writes into them is an error
    generators    of torch, Python and numpy: their state at the first call, then restored
    buffers       copies of those at the first call, so batch norm counts a micro-batch once
    autocast      as in the first call

The implementation is `torch.utils.checkpoint.checkpoint(use_reentrant=False)`. It does not change
the autograd graph, and so keeps the order of its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint

from lockstep.foreign_messages import OVERWRITTEN
from lockstep.kernel.buffers import Buffers, BufferSlot, have_same_bits
from lockstep.kernel.errors import LayoutError, UsageError
from lockstep.kernel.seeds import isolated, remembered
from lockstep.model.compilation import is_compiled, is_compiled_in_place

__all__ = ["ActivationCheckpointing", "check_blocks"]

Forward = Callable[..., Any]


class ActivationCheckpointing:
    """The recomputation of blocks in backward; does nothing without blocks."""

    def __init__(self, blocks: Mapping[str, nn.Module], device: torch.device) -> None:
        self._names = {block: name for name, block in reversed(list(blocks.items()))}
        self._device = device
        self._repeated: nn.Module | None = None

    def enable(self, buffers: Buffers) -> AbstractContextManager[None]:
        """Enable checkpointing of every block in the body; `buffers` are those of the step."""
        return self._enable(buffers) if self._names else nullcontext()

    @contextmanager
    def _enable(self, buffers: Buffers) -> Iterator[None]:
        with ExitStack() as stack:
            for block in self._names:
                # What was compiled in place is called outside of its graph.
                name = "_compiled_call_impl" if is_compiled_in_place(block) else "forward"
                forward = partial(self._run, block, getattr(block, name), buffers)
                stack.enter_context(_replace(block, name, forward))
            yield

    def explain_errors(self) -> AbstractContextManager[None]:
        """Convert errors of a backward in the body into a UsageError that names the block."""
        return self._explain_errors() if self._names else nullcontext()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise UsageError(
                    f"{self._describe_block(self._repeated)} produced a different result when it "
                    "was recomputed: its forward must depend only on its inputs, parameters, "
                    "buffers and random numbers, not on a counter that it keeps itself; change "
                    "that, or train without activation_checkpointing=True"
                ) from error
            if OVERWRITTEN in str(error):
                raise UsageError(
                    "a tensor that backward needs was overwritten in place; with "
                    "activation_checkpointing=True a block with parameters must not write into its "
                    "inputs, nor a later block into one of these that the block returned: let it "
                    f"write into a copy ({error})"
                ) from error
            raise

    def _run(
        self, block: nn.Module, forward: Forward, buffers: Buffers, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the forward of a block so that backward can repeat it."""
        if not torch.is_grad_enabled() or next(block.parameters(), None) is None:
            return forward(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        restore = remembered(self._device, everything=True)
        seen = _take_snapshot(buffers, block)
        calls = count()

        def run(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, structure)
            if next(calls) == 0:
                return forward(*args, **kwargs)
            self._repeated = block
            with isolated(self._device, everything=True), _restore_snapshot(seen):
                restore()
                return forward(*args, **kwargs)

        # Flat, because torch notices writes into arguments, and not into members of one.
        return checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=False)

    def _describe_block(self, block: nn.Module | None) -> str:
        return "a block" if block is None else f"block {self._names[block]}"


def check_blocks(model: nn.Module, names: Sequence[str]) -> None:
    """Raise LayoutError for a model whose blocks cannot be recomputed one by one."""
    if is_compiled(model):
        raise LayoutError(
            "activation_checkpointing=True recomputes block by block, and a compiled model is a "
            "single block: compile its blocks one by one instead, for instance by block.compile()"
        )
    if not names:
        raise LayoutError(
            f"activation_checkpointing=True recomputes block by block, and {type(model).__name__} "
            "does not name its blocks: pass a torch.nn.Sequential, define a method blocks(), or "
            "pass PipelineConfig(blocks=[...]) with the modules that its forward calls"
        )


@contextmanager
def _replace(block: nn.Module, name: str, forward: Forward) -> Iterator[None]:
    """Replace what a call of a module calls, the attribute `name`, in the body."""
    own = vars(block).get(name)
    vars(block)[name] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(block)[name]
        else:
            vars(block)[name] = own


BufferSnapshot = list[tuple[BufferSlot, torch.Tensor | None]]
"""The values of a block's buffers at the start of a call."""


def _take_snapshot(buffers: Buffers, block: nn.Module) -> BufferSnapshot:
    """Return the current values of a block's buffers."""
    inside = set(block.modules())
    return [
        (slot, _read_current(slot))
        for slot in buffers.slots
        if any(module in inside for module, _ in slot.registrations)
    ]


def _read_current(slot: BufferSlot) -> torch.Tensor | None:
    """Return the current value of a buffer: the step's own tensor if it has the same bits."""
    module, name = slot.registrations[0]
    tensor = module._buffers[name]
    if tensor is None or all(have_same_bits([(tensor, slot.tensor)])):
        return slot.tensor if tensor is not None else None
    return tensor.detach().clone()


@contextmanager
def _restore_snapshot(snapshot: BufferSnapshot) -> Iterator[None]:
    """Install copies of a snapshot in the body, which repeats a call; then discard them."""
    replaced = [
        (module, name, module._buffers[name])
        for slot, _ in snapshot
        for module, name in slot.registrations
    ]
    for slot, tensor in snapshot:
        slot.install(None if tensor is None else tensor.clone())
    try:
        yield
    finally:
        for module, name, tensor in replaced:
            module._buffers[name] = tensor
