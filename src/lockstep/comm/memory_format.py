"""Dense tensors as vectors of their elements in memory order."""

from __future__ import annotations

import torch

from lockstep.kernel.norm import is_dense

__all__ = ["in_format_of", "in_layout_of", "is_in_format_of"]


def is_in_format_of(tensor: torch.Tensor, model: torch.Tensor) -> bool:
    """Return whether memory holds the elements as `in_format_of` would copy them.

    Memory does not if the tensor is lazily conjugated or negated.
    """
    return tensor.stride() == model.stride() and not (tensor.is_conj() or tensor.is_neg())


def in_layout_of(vector: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """View a vector of `in_memory_order` in the shape and memory format of `model`."""
    if not is_dense(model):
        return vector.view(model.shape)
    return vector.as_strided(model.shape, model.stride())


def in_format_of(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the memory format in which `in_layout_of` views `model`."""
    keep = torch.preserve_format if is_dense(model) else torch.contiguous_format
    return torch.empty_like(model, memory_format=keep, requires_grad=False).copy_(tensor)
