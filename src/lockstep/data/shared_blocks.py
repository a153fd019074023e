"""Blocks of shared memory that loader workers fill with batches, again and again.

    worker   collates a batch ──> copies its tensors into a free block ──> sends their offsets
    rank     tensors in the block ──> the last of them is freed ──> the block is free again

torch allocates new shared memory for every tensor of every batch. The kernel clears each of its
pages, maps it in two processes, and a descriptor is sent for each tensor. Here a descriptor is sent
once per block. A block is an anonymous file (memfd), so the size of /dev/shm does not limit it.

If the script holds more batches than a worker has blocks, further ones are sent by torch.
"""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lockstep.data.iterable_dataset import IterableSource
from lockstep.data.map_dataset import Item, LoadedBatch, LoadFailure, MapSource
from lockstep.data.microbatch import ALIGNMENT
from lockstep.kernel.errors import SampleError

__all__ = ["BlockReader", "BlockWriter", "SharedMapSource", "SharedStream", "remedy", "share"]

BLOCKS = 8
"""The maximum number of blocks per worker: torch requests two batches ahead, and the script and the
trainer hold a few."""

RESERVE = 1.25
"""The size of a block relative to its first batch; memory that is not used costs nothing."""


class Slice(NamedTuple):
    """A tensor in a block: the offset in bytes, dtype, shape and strides."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in the memory of `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        first = self.offset // self.dtype.itemsize
        return empty.set_(storage, first, self.shape, self.stride)


class BlockReader:
    """The blocks of all workers, as the rank maps them.

    Attributes:
        in_use: uint8 [workers, BLOCKS] in shared memory: 1 from when a worker fills a block until
            the rank frees its last tensor.
        number: The number of this reader in its process.
    """

    def __init__(self, workers: int) -> None:
        self.in_use = torch.zeros(workers, BLOCKS, dtype=torch.uint8).share_memory_()
        self.number = next(_numbers)
        self._flags: NDArray[numpy.uint8] = self.in_use.numpy()
        self._mappings: dict[tuple[int, int], mmap.mmap] = {}
        _readers[self.number] = self

    def read(self, worker: int, slot: int, descriptor: Any, nbytes: int, pickled: bytes) -> Any:
        """Unpickle data whose tensors are in a block.

        Args:
            worker: The worker that wrote the batch.
            slot: The number of its block.
            descriptor: The descriptor of the block if it is new; otherwise None.
            nbytes: The size of the block in bytes.
            pickled: The data, with a `Slice` for each tensor.
        """
        if descriptor is not None:
            number = descriptor.detach()
            try:
                self._mappings[worker, slot] = mmap.mmap(number, nbytes)
            finally:
                os.close(number)
        lease = (ctypes.c_char * nbytes).from_buffer(self._mappings[worker, slot])
        # torch holds the lease for as long as a tensor has the storage.
        end = weakref.finalize(lease, _free, self._flags, (worker, slot), os.getpid())
        end.atexit = False
        storage = torch.frombuffer(lease, dtype=torch.uint8).untyped_storage()
        return _Unpickler(io.BytesIO(pickled), storage).load()


class _Unpickler(pickle.Unpickler):
    """Unpickles data with its tensors in the memory of a block."""

    def __init__(self, file: io.BytesIO, storage: torch.UntypedStorage) -> None:
        super().__init__(file)
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        """Return what makes a tensor of the fields of a `Slice`, or the global of this name."""
        if (module, name) == (__name__, _view.__name__):
            return partial(_view, self._storage)
        return super().find_class(module, name)


def _view(storage: torch.UntypedStorage, *place: Any) -> torch.Tensor:
    return Slice(*place).view(storage)


class _Pickler(ForkingPickler):
    """Pickles data and collects its tensors, for which it writes their places in a block.

    Tensors are replaced while they are pickled, not before: a container that checks its parts
    never gets anything else.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[tuple[Slice, torch.Tensor]] = []
        self.nbytes = 0

    def reducer_override(self, value: Any) -> Any:
        """Return the place of a tensor in the block; let torch pickle all else."""
        if not isinstance(value, torch.Tensor) or not _is_plain(value):
            return NotImplemented
        place = Slice(self.nbytes, value.dtype, tuple(value.shape), value.stride())
        self.nbytes += -(-max(value.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self.tensors.append((place, value))
        return _view, tuple(place)


def remedy(error: Exception, otherwise: str) -> str:
    """Return what to do about an error: `otherwise`, unless shared memory is full."""
    is_full = os.strerror(errno.ENOSPC) in str(error)
    return "enlarge /dev/shm (docker run --shm-size)" if is_full else otherwise


_numbers = count()
_readers: weakref.WeakValueDictionary[int, BlockReader] = weakref.WeakValueDictionary()
"""The readers of this process by their numbers, for `_receive`."""


def _free(flags: NDArray[numpy.uint8], place: tuple[int, int], process: int) -> None:
    if os.getpid() == process:  # a process that was forked meanwhile frees only its own copy
        flags[place] = 0


Block = tuple[int, int, Any, int]
"""Worker, slot, descriptor of a new block or None, size of the block in bytes."""


@dataclass(frozen=True)
class SharedBatch:
    """A batch on its way to the rank, which unpickles it as a `LoadedBatch`.

    Attributes:
        reader: The number of the rank's reader.
        block: The block of the tensors; None if torch sends them.
        size: The number of samples of the whole batch.
        parts: The pickled data of the micro-batches.
        descriptions: Descriptions of a few samples.
    """

    reader: int
    block: Block | None
    size: int
    parts: bytes
    descriptions: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Let the rank's reader make the tensors."""
        return _receive, (self.reader, self.block, self.size, self.parts, self.descriptions)


def _receive(
    number: int, block: Block | None, size: int, pickled: bytes, descriptions: tuple[str, ...]
) -> Item:
    reader = _readers.get(number)
    if reader is None:
        return LoadFailure("the batch arrived after its loader ended", SampleError)
    parts = reader.read(*block, pickled) if block else pickle.loads(pickled)
    return LoadedBatch(size, parts, descriptions)


class BlockWriter:
    """The blocks of one worker, in the worker."""

    def __init__(self, worker: int, in_use: torch.Tensor, reader: int) -> None:
        self.worker, self.reader = worker, reader
        self._flags: NDArray[numpy.uint8] = in_use[worker].numpy()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def write(self, item: Item) -> Item | SharedBatch:
        """Copy the tensors of an item into a free block; if there is none, let torch send them."""
        if isinstance(item, LoadFailure):
            return item
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        try:
            pickler.dump(item.parts)
            slot = self._choose(pickler.nbytes) if pickler.tensors else None
            if slot is None:
                parts = bytes(ForkingPickler.dumps(item.parts))
                return SharedBatch(self.reader, None, item.size, parts, item.descriptions)
        # Pickled here: in its queue, an error would leave the rank waiting.
        except Exception as error:  # objects raise arbitrary exceptions when they are pickled
            words = str(error).strip().splitlines() or [""]
            return LoadFailure(
                f"the batch cannot be sent from a loader worker ({type(error).__name__}: "
                f"{words[0].rstrip('.')}); {remedy(error, 'return other data from the dataset')}, "
                "or pass num_workers=0"
            )
        descriptor = None
        if slot not in self._storages or self._storages[slot].nbytes() < pickler.nbytes:
            descriptor = self._allocate(slot, int(pickler.nbytes * RESERVE))
        storage = self._storages[slot]
        for place, tensor in pickler.tensors:
            place.view(storage).copy_(tensor)
        self._flags[slot] = 1
        block = self.worker, slot, descriptor, storage.nbytes()
        parts = pickled.getvalue()
        return SharedBatch(self.reader, block, item.size, parts, item.descriptions)

    def _choose(self, nbytes: int) -> int | None:
        """Return a free block, if possible one that is large enough; None if all are in use."""
        free = [slot for slot in range(BLOCKS) if not self._flags[slot]]
        held = [slot for slot in free if slot in self._storages]
        fitting = [slot for slot in held if self._storages[slot].nbytes() >= nbytes]
        return next(iter([*fitting, *held, *free]), None)

    def _allocate(self, slot: int, nbytes: int) -> Any:
        """Make a new block for a slot; return its descriptor for the rank."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        number = os.memfd_create("lockstep-batch")
        try:
            os.ftruncate(number, nbytes)
            mapping = mmap.mmap(number, nbytes)
            self._storages[slot] = torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()
            return DupFd(number)
        finally:
            os.close(number)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether bytes, dtype, shape and strides are all of a tensor."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
    )


@dataclass(frozen=True)
class SharedMapSource(Dataset[Any]):
    """A `MapSource` whose workers write into blocks."""

    source: MapSource
    in_use: torch.Tensor
    reader: int

    @cached_property
    def _writer(self) -> BlockWriter:
        return _make_writer(self.in_use, self.reader)

    def __len__(self) -> int:
        """Return the number of global batches."""
        return len(self.source)

    def __getitem__(self, batch: int) -> Any:
        """Load a batch and write it into a block."""
        return self._writer.write(self.source[batch])


@dataclass(frozen=True)
class SharedStream(IterableDataset[Any]):
    """An `IterableSource` whose workers write into blocks."""

    source: IterableSource
    in_use: torch.Tensor
    reader: int

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of this worker and write them into blocks."""
        writer = _make_writer(self.in_use, self.reader)
        return map(writer.write, self.source)


def _make_writer(in_use: torch.Tensor, reader: int) -> BlockWriter:
    info = get_worker_info()
    assert info is not None
    return BlockWriter(info.id, in_use, reader)


def share(
    source: MapSource | IterableSource, reader: BlockReader
) -> SharedMapSource | SharedStream:
    """Return the source whose workers write into the blocks of `reader`."""
    kind: Any = SharedStream if isinstance(source, IterableSource) else SharedMapSource
    shared: SharedMapSource | SharedStream = kind(source, reader.in_use, reader.number)
    return shared
