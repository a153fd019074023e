"""The input of a stage's autograd graph; keeps the gradient exactly as autograd computed it.

    received h ──GraphInput──> h with a grad_fn ──> the blocks of the stage ──> outputs
                 │
                 └── backward: keeps the gradient of h, with its strides

A received tensor with `requires_grad` would be a leaf: the stage could not begin with an
in-place layer, and autograd would change the strides of `.grad`. Behind a `GraphInput` the
tensor is the result of an operation, as it is within the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["GraphInput", "GraphInputFunction"]


class GraphInput:
    """The received tensors of one micro-batch; the blocks use those in `tensors`."""

    def __init__(self, received: Sequence[torch.Tensor], requires_grad: Sequence[bool]) -> None:
        self.gradients: list[torch.Tensor | None] = [None] * sum(requires_grad)
        self.anchor: torch.Tensor | None = None
        self.tensors = list(received)
        if not any(requires_grad):
            return
        self.anchor = torch.empty(0, requires_grad=True)
        wanted = [number for number, needed in enumerate(requires_grad) if needed]
        entered: Any = GraphInputFunction.apply(  # type: ignore[no-untyped-call]
            self.anchor, self, [self.tensors[number] for number in wanted]
        )
        for number, tensor in zip(wanted, entered, strict=True):
            self.tensors[number] = tensor

    def free(self) -> None:
        """Release the tensors; autograd keeps those that the backward needs."""
        self.tensors = []


class GraphInputFunction(torch.autograd.Function):
    """Gives tensors a grad_fn; they are not its inputs, so its outputs are not views."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, graph_input: GraphInput, tensors: Any) -> Any:
        """Return the tensors, which are not the function's own inputs."""
        ctx.graph_input = graph_input
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Keep the gradients."""
        ctx.graph_input.gradients = list(gradients)
        return None, None, None
