"""Replicas: copies of a module for one micro-batch each, which share the memory of its parameters.

    module ──> replica of micro-batch 0    parameters: leaves with the memory of the module's
           ──> replica of micro-batch 1                buffers: copies

Each replica has its own gradients and buffers, so several threads can use replicas at the same
time, and gradients of micro-batches are added along the tree and not by autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["make_leaves", "move_tensors", "replicate"]


def move_tensors(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    """Return tensors on a device, by the id of the original; those on it are not copied."""
    return {id(each): each.detach().to(device) for each in tensors}


def make_leaves(
    parameters: Iterable[nn.Parameter], values: Mapping[int, torch.Tensor], has_gradient: bool
) -> dict[int, torch.Tensor]:
    """Return a parameter for each original one, by its id, with the memory of its value."""
    return {
        id(each): nn.Parameter(values[id(each)], each.requires_grad and has_gradient)
        for each in parameters
    }


def replicate(module: nn.Module, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
    """Return a copy of a module with other parameters and buffers.

    Other attributes and hooks are those of the module; an attribute that forward sets is lost.

    Args:
        module: The module.
        tensors: The parameters and buffers of the copy, by the ids of the original ones.
    """
    copies = {each: _copy_shallowly(each) for each in module.modules()}
    for each, copy in copies.items():
        for name, child in each._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, buffer in each._buffers.items():
            copy._buffers[name] = None if buffer is None else tensors[id(buffer)]
        # Recurrent layers keep a list of their weights, which they update in __setattr__.
        sets_itself = type(each).__setattr__ is not nn.Module.__setattr__
        for name, parameter in each._parameters.items():
            value: Any = None if parameter is None else tensors[id(parameter)]
            copy._parameters[name] = value
            if sets_itself and value is not None:
                setattr(copy, name, value)
    return copies[module]


def _copy_shallowly(module: nn.Module) -> nn.Module:
    """Return a copy of one module without parameters, with dictionaries of its own."""
    kind = type(module)
    if kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
        own: nn.Module = module._replicate_for_data_parallel()
        return own
    copy = kind.__new__(kind)
    copy.__dict__.update(  # torch sets five attributes, each of which is checked
        vars(module),
        _parameters={},
        _buffers=dict(module._buffers),
        _modules=dict(module._modules),
        _is_replica=True,
    )
    return copy
