"""Dense tensors as vectors of their elements in memory order."""

from __future__ import annotations

import torch

__all__ = ["in_format_of", "in_layout_of", "in_memory_order", "is_dense", "is_in_format_of"]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a block of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def is_in_format_of(tensor: torch.Tensor, model: torch.Tensor) -> bool:
    """Return whether memory holds the elements as `in_format_of` would copy them.

    Memory does not if the tensor is lazily conjugated or negated.
    """
    return tensor.stride() == model.stride() and not (tensor.is_conj() or tensor.is_neg())


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as a vector in memory order, without a copy.

    For a tensor with gaps or overlaps, the vector is a copy in logical order.
    """
    if tensor.is_contiguous() or not is_dense(tensor):
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def in_layout_of(vector: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """View a vector from `in_memory_order` in the shape and memory format of `model`."""
    if not is_dense(model):
        return vector.view(model.shape)
    return vector.as_strided(model.shape, model.stride())


def in_format_of(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the memory format in which `in_layout_of` views `model`."""
    keep = torch.preserve_format if is_dense(model) else torch.contiguous_format
    return torch.empty_like(model, memory_format=keep, requires_grad=False).copy_(tensor)
