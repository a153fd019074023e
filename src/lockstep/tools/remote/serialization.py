"""Serialization: functions, classes and values as bytes.

Functions and classes of `__main__` or a notebook are sent by value, by cloudpickle. Of a tensor
that is a view only its own elements are sent, with their strides, not the whole memory that it is
part of.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from lockstep.launcher.pickling import Pickler

__all__ = ["serialize"]


class Serializer(Pickler):
    """Pickles one value; views are copied first."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a view is rebuilt from its own elements; cloudpickle handles the rest."""
        if type(value) is torch.Tensor and value.layout is torch.strided and _is_view(value):
            own = value.detach().clone().requires_grad_(value.requires_grad and value.is_leaf)
            return own.__reduce_ex__(5)
        return super().reducer_override(value)


def _is_view(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.nbytes < tensor.untyped_storage().nbytes()


def serialize(value: Any) -> memoryview:
    """Return `value` as bytes for `pickle.loads`; errors of pickle are raised unchanged."""
    file = io.BytesIO()
    Serializer(file, protocol=5).dump(value)
    return file.getbuffer()
