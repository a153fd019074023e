"""The samples of a map-style dataset: one item = one replica's part of one global batch.

Two sources answer `source[b]` with the size of batch b and the data of its micro-batches:

    Samples   calls dataset[i] for each sample, seeded by (seed, epoch, i), and
              collates each micro-batch; runs in this process or in torch's workers
    Tensors   rows of tensors that are in memory already: no call a sample, no
              random numbers, the bits that collating the samples would give

A sample that raises comes back as a `Failure`, a value: an exception that crosses
from a worker is rebuilt by torch with a page of traceback in its message.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from lockstep.data.microbatch import copied, pieces
from lockstep.data.order import Epoch
from lockstep.data.probe import described, probe_collate, probe_samples, spread
from lockstep.errors import DatasetError, LockstepError, SampleError
from lockstep.randomness import key, seed_all

__all__ = ["Collate", "Failure", "Item", "Loaded", "Samples", "Share", "Tensors"]

Collate = Callable[[list[Any]], Any]

NOT_THE_USERS = (os.path.dirname(torch.__file__), os.path.dirname(__file__))


@dataclass(frozen=True)
class Share:
    """Which micro-batches are whose: `replica` of `replicas`, `microbatches` a batch."""

    microbatches: int
    replicas: int
    replica: int

    def pieces(self, samples: int) -> tuple[tuple[int, range], ...]:
        """Return (index, positions) of this replica's micro-batches in a batch of `samples`."""
        return pieces(samples, self.microbatches, self.replicas, self.replica)


@dataclass(frozen=True)
class Failure:
    """What went wrong in the dataset, as the beginning of a sentence."""

    sentence: str
    error: type[LockstepError] = SampleError

    @classmethod
    def of(cls, what: str, error: Exception) -> Failure:
        """Say that `what` raised `error`, and where."""
        words = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
        return cls(f"{what} raised {said}{_place(error)}")


def _place(error: Exception) -> str:
    """Say where in the user's own code `error` was raised: not in torch, not here."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(NOT_THE_USERS):
            return f", at {os.path.basename(frame.filename)}:{frame.lineno}"
    return ""


class Loaded(NamedTuple):
    """One replica's part of one global batch.

    Attributes:
        size: The samples of the whole batch.
        parts: The data of each micro-batch of the replica.
        probed: Of an epoch's first batch, what all ranks must share of a few samples.
    """

    size: int
    parts: list[Any]
    probed: tuple[str, ...] = ()


Item = Loaded | Failure


def collated(samples: list[Any], names: Sequence[int], dataset: str, collate: Collate) -> Any:
    """Make one micro-batch of `samples`, or the Failure that names them.

    torch's `default_collate` makes new tensors. Another function may return views of the
    dataset's memory, or a buffer that it uses again; so its result is copied. In a worker
    too: torch moves a tensor to shared memory together with all that shares its storage.
    """
    try:
        part = collate(samples)
        return part if collate is default_collate else copied(part)
    except Exception as error:
        shown = ", ".join(str(name) for name in names[:8]) + (", ..." if len(names) > 8 else "")
        which = f"sample{'s' if len(names) > 1 else ''} {shown} of {dataset}"
        return Failure.of(f"putting {which} into one micro-batch", error)


@dataclass(frozen=True)
class Samples(Dataset[Item]):
    """Loads and collates sample by sample; holds all it needs, for workers."""

    dataset: Any
    epoch: Epoch
    share: Share
    keys: tuple[int, int]  # seed, epoch
    collate: Collate | None = None
    first: int = -1  # the batch whose samples are probed

    def __len__(self) -> int:
        """Return the number of global batches."""
        return len(self.epoch)

    def __getitem__(self, batch: int) -> Item:
        """Load this replica's micro-batches of global batch `batch`."""
        span = self.epoch.span(batch)
        pieces = [span[piece.start : piece.stop] for _, piece in self.share.pieces(len(span))]
        try:
            probed = self._probe(span, pieces) if batch == self.first else ()
        except DatasetError as error:
            return Failure(str(error), DatasetError)
        parts: list[Any] = []
        for piece in pieces:
            part = self._microbatch(piece)
            if isinstance(part, Failure):
                return part
            parts.append(part)
        return Loaded(len(span), parts, probed)

    def _probe(self, span: range, pieces: Sequence[range]) -> tuple[str, ...]:
        positions = spread(span)
        names = self.epoch.indices[positions].tolist()
        found = probe_samples(self._sample, positions, names, self.dataset)
        if self.collate is not None and pieces:
            probe_collate(lambda: self._microbatch(pieces[0]), self.collate)
        return found

    def _sample(self, position: int) -> Any:
        """Load the sample at a position of the order."""
        index = int(self.epoch.indices[position])
        seed_all(key(*self.keys, index, *self._again(position)))
        return self.dataset[index]

    def _microbatch(self, positions: range) -> Any:
        indices = self.epoch.indices[positions.start : positions.stop].tolist()
        samples = []
        for position, index in zip(positions, indices, strict=True):
            try:
                samples.append(self._sample(position))
            except Exception as error:
                return Failure.of(f"sample {index} of {type(self.dataset).__name__}", error)
        name = type(self.dataset).__name__
        return collated(samples, indices, name, self.collate or default_collate)

    def _again(self, position: int) -> tuple[int, ...]:
        """Extend the key of a sample that was drawn before in this epoch."""
        if self.epoch.repeats is None or not self.epoch.repeats[position]:
            return ()
        return (int(self.epoch.repeats[position]),)


@dataclass(frozen=True)
class Tensors:
    """Takes rows of tensors in memory: `rows[p]` is the row of position p of the order."""

    tensors: tuple[torch.Tensor, ...]
    rows: torch.Tensor
    epoch: Epoch
    share: Share
    first: int = -1  # the batch of which a few samples are described

    @classmethod
    def of(cls, dataset: Any, epoch: Epoch, share: Share, first: int = -1) -> Tensors | None:
        """Return the source, or None where `dataset` is no plain TensorDataset below Subsets."""
        rows = epoch.indices
        while type(dataset) is Subset:
            indices = torch.as_tensor(dataset.indices, dtype=torch.int64)
            if not _within(rows, len(indices)):
                return None
            rows, dataset = indices[rows], dataset.dataset
        if type(dataset) is not TensorDataset or not _within(rows, len(dataset)):
            return None
        if not all(_is_plain(tensor) for tensor in dataset.tensors):
            return None
        return cls(dataset.tensors, rows, epoch, share, first)

    def __getitem__(self, batch: int) -> Item:
        """Take this replica's micro-batches of global batch `batch`."""
        span = self.epoch.span(batch)
        parts: list[Any] = []
        for _, piece in self.share.pieces(len(span)):
            rows = self.rows[span.start + piece.start : span.start + piece.stop]
            parts.append([tensor.index_select(0, rows) for tensor in self.tensors])
        return Loaded(len(span), parts, self._described(span) if batch == self.first else ())

    def _described(self, span: range) -> tuple[str, ...]:
        positions = spread(span)
        names, rows = self.epoch.indices[positions].tolist(), self.rows[positions].tolist()
        return tuple(
            described(name, [tensor[row] for tensor in self.tensors])
            for name, row in zip(names, rows, strict=True)
        )


def _within(rows: torch.Tensor, length: int) -> bool:
    """Are all rows below `length`, and none negative? Else the dataset itself shall speak."""
    return len(rows) == 0 or bool(rows.min() >= 0 and rows.max() < length)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
    )
