"""The input of the autograd graph of a stage: received tensors that get gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["GraphInput"]


class GraphInput:
    """The received tensors of one micro-batch; `tensors` are those that the blocks use."""

    def __init__(self, received: Sequence[torch.Tensor], requires_grad: Sequence[bool]) -> None:
        self.gradients: list[torch.Tensor | None] = [None] * sum(requires_grad)
        self.tensors = list(received)
        if not any(requires_grad):
            return
        wanted = [number for number, needed in enumerate(requires_grad) if needed]
        entered: Any = GraphInputFunction.apply(  # type: ignore[no-untyped-call]
            torch.empty(0, requires_grad=True), self, [self.tensors[number] for number in wanted]
        )
        for number, tensor in zip(wanted, entered, strict=True):
            self.tensors[number] = tensor

    def free(self) -> None:
        """Release the tensors; autograd keeps those that the backward needs."""
        self.tensors = []


class GraphInputFunction(torch.autograd.Function):
    """Gives tensors a grad_fn. They are not inputs of the function, so its outputs are no views."""

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
