"""Serialization: functions, classes and values as bytes.

    pieces[0]     the pickle, by cloudpickle: functions and classes of __main__ or a notebook
                  are sent by value
    pieces[1:]    a copy of the memory of each dense CPU tensor and numpy array, because the caller
                  may change it before another thread has sent it

A received tensor uses the memory that it was received into. References are not part of the
pickle: the sender lends the receiver a token for each.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.launcher.pickling import Pickler
from lockstep.remote.objects import ObjectAddress, RemoteObject
from lockstep.transport.frame import Buffer

__all__ = ["deserialize", "serialize"]

Lend = Callable[[ObjectAddress], ObjectAddress]
"""Returns the reference to send to the receiver, with its own token."""


class Serializer(Pickler):
    """Pickles one value; tensors and references are handled separately."""

    def __init__(self, file: io.BytesIO, lend: Lend, pieces: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=pieces.append)
        self._lend = lend

    def persistent_id(self, thing: Any) -> ObjectAddress | None:
        """Return the address that replaces a reference; None for any other object."""
        return self._lend(thing._address) if type(thing) is RemoteObject else None

    def reducer_override(self, thing: Any) -> Any:
        """Return how a plain tensor is rebuilt from its memory; cloudpickle handles the rest."""
        if type(thing) is torch.Tensor and _is_plain(thing):
            return _reduce_tensor(thing)
        return super().reducer_override(thing)


class Deserializer(pickle.Unpickler):
    """Unpickles one value; `resolve` returns the object or the reference for an address."""

    def __init__(
        self, file: io.BytesIO, resolve: Callable[[ObjectAddress], Any], pieces: Sequence[Buffer]
    ) -> None:
        super().__init__(file, buffers=pieces)
        self._resolve = resolve

    def persistent_load(self, pid: ObjectAddress) -> Any:
        """Return the object or the reference for an address in this process."""
        return self._resolve(pid)


def serialize(value: Any, lend: Lend) -> list[Buffer]:
    """Return the pieces of `value`; errors of pickle are raised unchanged."""
    file, tensors = io.BytesIO(), list[pickle.PickleBuffer]()
    Serializer(file, lend, tensors).dump(value)
    return [file.getbuffer(), *(memoryview(bytes(tensor.raw())) for tensor in tensors)]


def deserialize(pieces: Sequence[Buffer], resolve: Callable[[ObjectAddress], Any]) -> Any:
    """Return the value of received pieces."""
    return Deserializer(io.BytesIO(pieces[0]), resolve, pieces[1:]).load()


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Return a tensor's memory and layout; gaps are removed, the order of strides is kept."""
    dense = tensor.detach()
    if not _is_dense(dense):
        dense = dense.clone(memory_format=torch.preserve_format)
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    memory = pickle.PickleBuffer(flat.numpy().data) if dense.numel() else b""
    leaf = tensor.requires_grad and tensor.is_leaf
    return _rebuild_tensor, (memory, dense.dtype, tuple(dense.shape), dense.stride(), leaf)


def _rebuild_tensor(
    memory: Buffer, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], leaf: bool
) -> torch.Tensor:
    flat = torch.frombuffer(memory, dtype=dtype) if len(memory) else torch.empty(0, dtype=dtype)
    return flat.as_strided(shape, stride).requires_grad_(leaf)


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
