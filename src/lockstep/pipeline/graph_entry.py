"""The entry: where a stage's graph begins, and its gradient is taken as autograd made it.

    received h ──Entry──> h with a history ──> the blocks of the stage ──> outputs
                 │
                 └── backward: keeps the gradient of h, with the strides it came in

A received tensor that simply required a gradient would be a leaf: an in-place layer
could not begin the stage, and `.grad` would be laid out anew. Behind an `Entry` it
is what it would be within the whole model, the result of an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Enter", "Entry"]


class Entry:
    """The received tensors of one micro-batch; `tensors` are what the blocks are given."""

    def __init__(self, received: Sequence[torch.Tensor], differentiable: Sequence[bool]) -> None:
        self.gradients: list[torch.Tensor | None] = [None] * sum(differentiable)
        self.anchor: torch.Tensor | None = None
        self.tensors = list(received)
        if not any(differentiable):
            return
        self.anchor = torch.empty(0, requires_grad=True)
        wanted = [number for number, needed in enumerate(differentiable) if needed]
        entered: Any = Enter.apply(  # type: ignore[no-untyped-call]
            self.anchor, self, [self.tensors[number] for number in wanted]
        )
        for number, tensor in zip(wanted, entered, strict=True):
            self.tensors[number] = tensor

    def leave(self) -> None:
        """Let go of the tensors: what the blocks need of them, autograd keeps."""
        self.tensors = []


class Enter(torch.autograd.Function):
    """Gives tensors a history: they are no inputs of it, so what it returns are no views."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, entry: Entry, tensors: Any) -> Any:
        """Return the tensors, which are not the function's own inputs."""
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Keep the gradients."""
        ctx.entry.gradients = list(gradients)
        return None, None, None
