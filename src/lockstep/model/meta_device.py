"""Presence: which tensors of a model have memory on this rank.

    alive      has weights, on the rank's device
    meta       name, shape, strides and dtype only: another rank's, or not yet given weights

A parameter stays the same object when it changes sides, so that optimizers, ties and
recurrent layers, which hold weak references to their weights, still know it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["materialize", "moved", "release", "tensors_of"]


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, then buffers, each once, by its first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def moved(module: nn.Module, device: str | torch.device) -> nn.Module:
    """Move what has memory to `device`; what is on the meta device stays there."""
    if any(tensor.is_meta for tensor in tensors_of(module).values()):
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        return module
    return module.to(device)


def materialize(
    module: nn.Module, device: str | torch.device, wanted: Callable[[str], bool] = lambda name: True
) -> None:
    """Give memory, of any content, to the `wanted` tensors that are on the meta device."""
    for name, parameter in module.named_parameters():
        if parameter.is_meta and wanted(name):
            _become(parameter, device)
    made = {
        id(tensor): torch.empty_like(tensor, device=device)
        for name, tensor in module.named_buffers()
        if tensor.is_meta and wanted(name)
    }
    for part in module.modules():
        for entry, tensor in part._buffers.items():
            part._buffers[entry] = made.get(id(tensor), tensor)


def release(model: nn.Module, kept: Callable[[str], bool]) -> None:
    """Move the parameters and buffers whose first name is not `kept` to the meta device.

    Parameters keep their identity, so that an optimizer still knows them.
    """
    for name, parameter in list(model.named_parameters()):
        if not kept(name) and not parameter.is_meta:
            parameter.grad = None
            _become(parameter, "meta")
    let_go = {id(tensor) for name, tensor in model.named_buffers() if not kept(name)}
    for module in model.modules():
        for entry, tensor in module._buffers.items():
            if id(tensor) in let_go and tensor is not None:
                module._buffers[entry] = torch.empty_like(tensor, device="meta")


def _become(parameter: nn.Parameter, device: str | torch.device) -> None:
    """Let a parameter be an empty one on `device`."""
    empty = torch.empty_like(parameter, device=device, requires_grad=False)
    # Not torch.utils.swap_tensors, which refuses where there are weak references.
    other = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, other)
