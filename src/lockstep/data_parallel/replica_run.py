"""One micro-batch of a call of `ls.DataParallel`: its replica, its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.data_parallel.scatter import GatheredTensor, Part, list_tensors
from lockstep.kernel.errors import UsageError
from lockstep.model.batch_norm import explain_batch_norm
from lockstep.model.buffers import Buffers
from lockstep.model.forward import check_scalar, compute_loss
from lockstep.model.units import UnitCalls, Units

__all__ = ["ReplicaRun"]


@dataclass(eq=False)
class ReplicaRun:
    """One micro-batch on its replica.

    Attributes:
        index: The micro-batch.
        size: The number of its samples.
        place: The micro-batch and its device, for messages.
        device: Its device.
        part: Its arguments.
        share: Its share in the loss of the batch.
        loss: The loss function; None if the outputs of the replica are the result.
        replica: The replica of the module.
        leaves: The parameters of the replica that get gradients.
        buffers: The buffers of the replica; None if it has none.
        outputs: What the replica, or the loss, returned.
        tensors: The tensors in the outputs.
        take_loss_turn: A function that returns the context in which the loss is computed.
        units: The units of the replica, if their calls are seeded one after another.
        calls: The calls of the units in forward.
        state: The states of the generators at the end of forward.
    """

    index: int
    size: int
    place: str
    device: torch.device
    part: Part
    share: float
    loss: Callable[..., Any] | None
    replica: nn.Module
    leaves: Sequence[torch.Tensor]
    buffers: Buffers | None
    outputs: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    take_loss_turn: Callable[[], AbstractContextManager[None]] = nullcontext
    units: Units | None = None
    calls: UnitCalls | None = None
    state: bytes = b""

    def forward(self) -> None:
        """Call the replica, and the loss function if there is one, with this micro-batch."""
        args, kwargs = self.part.data
        try:
            if self.loss is None:
                self.outputs = self.replica(*args, **kwargs)
            else:
                *inputs, targets = args
                outputs = self.replica(*inputs, **kwargs)
                with self.take_loss_turn():
                    self.outputs, _ = compute_loss(self.loss, {}, outputs, targets, self.place)
                check_scalar(self.outputs, self.place)
        except ValueError as error:
            if self.size > 1 or explain_batch_norm(error, self.place) is None:
                raise
            raise UsageError(
                f"{self.place} holds one sample, and batch norm cannot train on one: choose the "
                "batch size and the number of micro-batches so that each holds at least two"
            ) from error
        self.tensors = list_tensors(self.outputs)

    def pair_gradients(
        self, gathered: Sequence[GatheredTensor], gradients: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors at which backward begins, and their gradients."""
        pairs = [
            (tensor, each.split_gradient(gradient, self.index))
            for tensor, each, gradient in zip(self.tensors, gathered, gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]

    def backward(
        self,
        gathered: Sequence[GatheredTensor],
        gradients: Sequence[torch.Tensor | None],
        keeps_graph: bool,
    ) -> None:
        """Run backward from the outputs, with their parts of the gradients."""
        roots, given = self.pair_gradients(gathered, gradients)
        if roots:
            torch.autograd.backward(roots, given, retain_graph=keeps_graph)

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Remove and return the gradients of the parameters; None for a parameter without one."""
        return [_coalesce(_take_gradient(each)) for each in self.leaves]

    def take_input_gradients(self) -> list[torch.Tensor | None]:
        """Remove and return the gradients of the arguments that need one."""
        return [_take_gradient(each) for each in self.part.leaves]


def _take_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    gradient, tensor.grad = tensor.grad, None
    return gradient


def _coalesce(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient
