"""Replicas: copies of a module for one micro-batch each, which share the memory of its parameters.

    module ──> replica of micro-batch 0    parameters: leaves with the memory of the module's
           ──> replica of micro-batch 1                buffers: copies

Each replica has its own gradients and buffers, so gradients of micro-batches are added along the
tree and not by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.data_parallel.scatter import SplitGradient, list_tensors
from lockstep.kernel.errors import LockstepError, UsageError
from lockstep.kernel.rng_scopes import RngScopes, ScopeCalls
from lockstep.model.forward import compute_loss, explain_batch_norm
from lockstep.model.generator_states import set_state_of_torch, state_of_torch
from lockstep.model.loss_root import check_scalar

__all__ = ["Replica", "replicate"]


def replicate(module: nn.Module, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
    """Return a copy of a module with other parameters and buffers.

    Other attributes and hooks are those of the module; an attribute that forward sets is lost.

    Args:
        module: The module.
        tensors: The parameters and buffers of the copy, by the ids of the original ones.
    """
    copies: dict[nn.Module, nn.Module] = {
        part: part._replicate_for_data_parallel() for part in module.modules()
    }
    for part, copy in copies.items():
        for name, child in part._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, buffer in part._buffers.items():
            copy._buffers[name] = None if buffer is None else tensors[id(buffer)]
        # Recurrent layers keep a list of their weights, which they update in __setattr__.
        sets_itself = type(part).__setattr__ is not nn.Module.__setattr__
        for name, parameter in part._parameters.items():
            value: Any = None if parameter is None else tensors[id(parameter)]
            copy._parameters[name] = value
            if sets_itself and value is not None:
                setattr(copy, name, value)
    return copies[module]


@dataclass(eq=False)
class Replica:
    """One micro-batch on its replica of the module.

    Attributes:
        index: The micro-batch.
        size: The number of its samples.
        device: Its device.
        label: The micro-batch and its device, for messages.
        data: Its arguments, positional and by name.
        module: The replica of the module.
        parameters: The parameters of the replica that get gradients.
        scopes: The RNG scopes of the replica, whose random numbers are seeded.
        loss: The loss function; None if the outputs of the replica are the result.
        outputs: What the replica, or the loss, returned.
        tensors: The tensors in the outputs.
        calls: The calls of the scopes in forward.
        state: The states of the generators at the end of forward.
    """

    index: int
    size: int
    device: torch.device
    label: str
    data: tuple[Sequence[Any], Mapping[str, Any]]
    module: nn.Module
    parameters: Sequence[torch.Tensor]
    scopes: RngScopes
    loss: Callable[..., Any] | None
    outputs: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    calls: ScopeCalls | None = None
    state: bytes = b""

    def forward(self, step: int) -> None:
        """Call the replica, and the loss function if there is one, with this micro-batch."""
        with self._named(), self.scopes.install_hooks():
            self.scopes.begin_microbatch(step, self.index)
            self.outputs = self._compute()
            self.state = state_of_torch(self.device)
            self.calls = self.scopes.pause()
        self.tensors = list_tensors(self.outputs)

    def _compute(self) -> Any:
        args, kwargs = self.data
        try:
            if self.loss is None:
                return self.module(*args, **kwargs)
            *inputs, targets = args
            outputs = self.module(*inputs, **kwargs)
            value, _ = compute_loss(self.loss, {}, outputs, targets, self.label)
            check_scalar(value, self.label)
            return value
        except ValueError as error:
            if self.size > 1 or explain_batch_norm(error, self.label) is None:
                raise
            raise UsageError(
                f"{self.label} holds one sample, and batch norm cannot train on one: choose the "
                "batch size and the number of micro-batches so that each holds at least two"
            ) from error

    def backward(
        self,
        splits: Sequence[SplitGradient],
        gradients: Sequence[torch.Tensor | None],
        keeps_graph: bool,
    ) -> None:
        """Run backward from the outputs, with their parts of the gradients."""
        pairs = [
            (tensor, split(gradient, self.index))
            for tensor, split, gradient in zip(self.tensors, splits, gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        if pairs:
            with self._named(), self.scopes.install_hooks():
                set_state_of_torch(self.state, self.device)
                self.scopes.resume(self.calls)
                roots, given = zip(*pairs, strict=True)
                torch.autograd.backward(roots, given, retain_graph=keeps_graph)

    @contextmanager
    def _named(self) -> Any:
        """Make the device current in the body, and name the micro-batch in its errors."""
        is_cpu = self.device.type == "cpu"
        try:
            with nullcontext() if is_cpu else torch.accelerator.device_index(self.device.index):
                yield
        except BaseException as error:
            if not isinstance(error, LockstepError):  # whose messages name the place
                error.add_note(f"in {self.label}")
            raise
