"""Serialization: functions, classes and values as bytes; tensors beside them, not copied.

    pieces[0]     the pickle, by cloudpickle: what is defined in __main__ or a
                  notebook travels by value
    pieces[1:]    the memory of each dense CPU tensor and numpy array, as it lies

A received tensor uses the memory that it was received into. References are no
part of the pickle: the sender lends the receiver a token for each.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from lockstep.remote.frame import Buffer
from lockstep.remote.objects import Address
from lockstep.remote.reference import Remote

__all__ = ["pack", "unpack"]

Lend = Callable[[Address], Address]
"""Gives the receiver of a reference one of its own."""


class Serializer(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles one value, tensors and references aside."""

    def __init__(self, file: io.BytesIO, lend: Lend, pieces: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=pieces.append)
        self._lend = lend

    def persistent_id(self, thing: Any) -> Address | None:
        """Return what stands for a reference."""
        return self._lend(thing._address) if type(thing) is Remote else None

    def reducer_override(self, thing: Any) -> Any:
        """Return how a plain tensor is rebuilt from its memory; cloudpickle knows the rest."""
        if type(thing) is torch.Tensor and _plain(thing):
            return _reduced(thing)
        return super().reducer_override(thing)


class Deserializer(pickle.Unpickler):
    """Reads one value; `resolve` gives the object or the reference of an address."""

    def __init__(
        self, file: io.BytesIO, resolve: Callable[[Address], Any], pieces: Sequence[Buffer]
    ) -> None:
        super().__init__(file, buffers=pieces)
        self._resolve = resolve

    def persistent_load(self, pid: Address) -> Any:
        """Return what an address stands for in this process."""
        return self._resolve(pid)


def pack(value: Any, lend: Lend) -> list[Buffer]:
    """Return the pieces of `value`; what the pickle raises where it cannot travel."""
    file, tensors = io.BytesIO(), list[pickle.PickleBuffer]()
    Serializer(file, lend, tensors).dump(value)
    return [file.getbuffer(), *(tensor.raw() for tensor in tensors)]


def unpack(pieces: Sequence[Buffer], resolve: Callable[[Address], Any]) -> Any:
    """Return the value of received pieces."""
    return Deserializer(io.BytesIO(pieces[0]), resolve, pieces[1:]).load()


def _plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _reduced(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Describe a tensor by its memory; one with gaps is made dense, its strides kept in order."""
    dense = tensor.detach()
    if not _dense(dense):
        dense = dense.clone(memory_format=torch.preserve_format)
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    memory = pickle.PickleBuffer(flat.numpy().data) if dense.numel() else b""
    leaf = tensor.requires_grad and tensor.is_leaf
    return _rebuilt, (memory, dense.dtype, tuple(dense.shape), dense.stride(), leaf)


def _rebuilt(
    memory: Buffer, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], leaf: bool
) -> torch.Tensor:
    flat = torch.frombuffer(memory, dtype=dtype) if len(memory) else torch.empty(0, dtype=dtype)
    return flat.as_strided(shape, stride).requires_grad_(leaf)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their stretch of memory, in whatever order."""
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
