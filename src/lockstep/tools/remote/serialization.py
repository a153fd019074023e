"""Serialization: functions, classes and values as bytes.

Functions and classes of `__main__` or a notebook are sent by value, by cloudpickle. Of a dense CPU
tensor only its own elements are sent, with their strides: a view does not carry the whole memory
that it is part of. A received tensor is in memory that torch has allocated and aligned.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.launcher.pickling import Pickler

__all__ = ["deserialize", "serialize"]


class Serializer(Pickler):
    """Pickles one value; plain tensors are handled separately."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a plain tensor is rebuilt from its memory; cloudpickle handles the rest."""
        if type(value) is torch.Tensor and _is_plain(value):
            return _reduce_tensor(value)
        return super().reducer_override(value)


def serialize(value: Any) -> memoryview:
    """Return `value` as bytes; errors of pickle are raised unchanged."""
    file = io.BytesIO()
    Serializer(file, protocol=5).dump(value)
    return file.getbuffer()


def deserialize(content: bytes | memoryview) -> Any:
    """Return the value of received bytes."""
    return pickle.loads(content)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Return a tensor's elements and layout; gaps are removed, the order of strides is kept."""
    dense = tensor.detach()
    if not _is_dense(dense):
        dense = dense.clone(memory_format=torch.preserve_format)
    memory = pickle.PickleBuffer(_flatten(dense).numpy().data)
    leaf = tensor.requires_grad and tensor.is_leaf
    return _rebuild_tensor, (memory, dense.dtype, tuple(dense.shape), dense.stride(), leaf)


def _rebuild_tensor(
    memory: bytearray, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], leaf: bool
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype)
    _flatten(tensor).numpy().data[:] = memory
    return tensor.requires_grad_(leaf)


def _flatten(dense: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as bytes."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps, in any dimension order."""
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
