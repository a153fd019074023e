"""Batches of loader workers in shared memory, one anonymous file (memfd) per batch.

    worker   collates a batch ──> copies its tensors into a new file ──> sends its descriptor
    rank     maps the file ──> tensors in it ──> the memory is freed with the last of them

torch would send a descriptor for each tensor, and needs memory in /dev/shm, which is 64 MB in many
containers.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NamedTuple

import torch

from lockstep.data.map_dataset import LoadedBatch, LoadFailure
from lockstep.data.microbatch import ALIGNMENT
from lockstep.foreign_messages import FULL_MEMORY

__all__ = ["remedy", "share_batch"]


class Slice(NamedTuple):
    """A tensor in a file: the offset in bytes, dtype, shape and strides."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in the memory of `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        first = self.offset // self.dtype.itemsize
        return empty.set_(storage, first, self.shape, self.stride)


@dataclass(frozen=True)
class SharedBatch:
    """A batch on its way to the rank, which unpickles it as a `LoadedBatch`.

    Attributes:
        descriptor: The descriptor of the file; None for a batch without tensors.
        nbytes: The size of the file in bytes.
        size: The number of samples of the whole batch.
        parts: The pickled data of the micro-batches, with a `Slice` for each tensor.
        descriptions: Descriptions of a few samples.
    """

    descriptor: Any
    nbytes: int
    size: int
    parts: bytes
    descriptions: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Let the rank make the tensors."""
        return _receive, (self.descriptor, self.nbytes, self.size, self.parts, self.descriptions)


def share_batch(item: Any) -> Any:
    """Return an `Item` as a `SharedBatch`; call this in a worker. A failure stays as it is."""
    if isinstance(item, LoadFailure) or not hasattr(os, "memfd_create"):
        return item
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    try:
        # Pickled here: in its queue, an error would leave the rank waiting.
        pickler.dump(item.parts)
        descriptor = _write(pickler.tensors, pickler.nbytes) if pickler.tensors else None
    except Exception as error:  # objects raise arbitrary exceptions when they are pickled
        words = str(error).strip().splitlines() or [""]
        return LoadFailure(
            f"the batch cannot be sent from a loader worker ({type(error).__name__}: "
            f"{words[0].rstrip('.')}); {remedy(error, 'return other data from the dataset')}, "
            "or pass num_workers=0"
        )
    parts = pickled.getvalue()
    return SharedBatch(descriptor, pickler.nbytes, item.size, parts, item.descriptions)


def remedy(error: Exception, otherwise: str) -> str:
    """Return what to do about an error: `otherwise`, unless shared memory is full."""
    is_full = FULL_MEMORY in str(error)
    return "enlarge /dev/shm (docker run --shm-size)" if is_full else otherwise


def _write(tensors: list[tuple[Slice, torch.Tensor]], nbytes: int) -> Any:
    """Write tensors into a new file; return its descriptor for the rank."""
    number = os.memfd_create("lockstep-batch")
    try:
        os.ftruncate(number, nbytes)
        storage = _map(number, nbytes)
        for part, tensor in tensors:
            part.view(storage).copy_(tensor)
        return DupFd(number)
    finally:
        os.close(number)


def _map(number: int, nbytes: int) -> torch.UntypedStorage:
    """Return the memory of a file, which stays mapped for as long as a tensor has the storage."""
    return torch.frombuffer(mmap.mmap(number, nbytes), dtype=torch.uint8).untyped_storage()


def _receive(
    descriptor: Any, nbytes: int, size: int, pickled: bytes, descriptions: tuple[str, ...]
) -> LoadedBatch:
    storage = torch.UntypedStorage()
    if descriptor is not None:
        number = descriptor.detach()
        try:
            storage = _map(number, nbytes)
        finally:
            os.close(number)
    parts = _Unpickler(io.BytesIO(pickled), storage).load()
    return LoadedBatch(size, parts, descriptions)


class _Pickler(ForkingPickler):
    """Pickles data and collects its tensors, for which it writes their slices of a file.

    Tensors are replaced while they are pickled, not before: a container that checks its parts
    never gets anything else.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[tuple[Slice, torch.Tensor]] = []
        self.nbytes = 0

    def reducer_override(self, value: Any) -> Any:
        """Return the slice of a tensor; let torch pickle all else."""
        if not isinstance(value, torch.Tensor) or not _is_plain(value):
            return NotImplemented
        part = Slice(self.nbytes, value.dtype, tuple(value.shape), value.stride())
        self.nbytes += -(-max(value.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self.tensors.append((part, value))
        return _view, tuple(part)


class _Unpickler(pickle.Unpickler):
    """Unpickles data with its tensors in the memory of a file."""

    def __init__(self, file: io.BytesIO, storage: torch.UntypedStorage) -> None:
        super().__init__(file)
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        """Return what makes a tensor of the fields of a `Slice`, or the global of this name."""
        if (module, name) == (__name__, _view.__name__):
            return partial(_view, self._storage)
        return super().find_class(module, name)


def _view(storage: torch.UntypedStorage, *fields: Any) -> torch.Tensor:
    return Slice(*fields).view(storage)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether bytes, dtype, shape and strides are all of a tensor."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
    )
