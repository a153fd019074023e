"""Loading of a map-style dataset; an item is one replica's part of one global batch.

There are two sources; `source[b]` has the size of batch b and the data of its micro-batches:

    MapSource      calls dataset[i] for each sample, seeded by (seed, epoch, i), and collates
                   each micro-batch; runs in this process or in torch's workers
    TensorSource   selects rows of tensors in memory: no call per sample, no random numbers,
                   the same bits as collating the samples

An exception in the dataset is returned as a `LoadFailure`, because torch puts the whole traceback
of a worker's exception into the message.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from lockstep.data.assignment import ReplicaShare
from lockstep.data.epoch_order import EpochOrder
from lockstep.data.microbatch import clone_tensors
from lockstep.data.repeatability import (
    check_samples,
    collate_and_check,
    describe_sample,
    is_checked,
    select_positions,
)
from lockstep.kernel.errors import DatasetError, LockstepError, SampleError
from lockstep.kernel.seeds import key, seed_all

__all__ = [
    "Collate",
    "LoadFailure",
    "LoadedBatch",
    "LoadedItem",
    "MapSource",
    "TensorSource",
    "collate_samples",
    "hidden_worker_info",
    "is_own",
]

Collate = Callable[[list[Any]], Any]

MicrobatchKey = tuple[int, int, int, int]
"""A micro-batch: the seed of the order, the epoch, the batch and the micro-batch."""

LIBRARY_FOLDERS = (os.path.dirname(torch.__file__), os.path.dirname(__file__))


@dataclass(frozen=True)
class LoadFailure:
    """An error of the dataset: its message and the type of the exception to raise."""

    message: str
    error: type[LockstepError] = SampleError

    @classmethod
    def of(cls, what: str, error: Exception) -> LoadFailure:
        """Return the failure of `what`, which raised `error`, with its location in user code."""
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return cls(f"{what} raised {text}{_locate(error)}")


def _locate(error: Exception) -> str:
    """Return the innermost location of `error` in user code; "" if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(LIBRARY_FOLDERS):
            return f", at {os.path.basename(frame.filename)}:{frame.lineno}"
    return ""


class LoadedBatch(NamedTuple):
    """One replica's part of one global batch.

    Attributes:
        size: The number of samples of the whole batch.
        parts: The data of each micro-batch of the replica.
        descriptions: Descriptions of a few samples of the first batch, equal on all ranks.
    """

    size: int
    parts: list[Any]
    descriptions: tuple[str, ...] = ()


LoadedItem = LoadedBatch | LoadFailure


@contextlib.contextmanager
def hidden_worker_info() -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info` return None in the body, as outside of workers."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def is_own(collate: Collate | None) -> bool:
    """Return whether a function to collate samples is the user's, which is checked."""
    return collate is not None and collate is not default_collate


def collate_samples(
    samples: list[Any],
    names: Sequence[int],
    dataset: str,
    collate: Collate,
    microbatch_key: MicrobatchKey,
) -> Any:
    """Collate one micro-batch; if that fails, return a LoadFailure that names the samples.

    A function other than torch's may draw random numbers, for instance to mask tokens or to mix
    images. They are seeded by the micro-batch, because a rank collates several.

    torch's `default_collate` creates new tensors. Another function may return views of the
    dataset's memory or a buffer that it reuses, so its result is copied. This is needed in workers
    too, because torch moves a tensor to shared memory together with the rest of its storage.

    Args:
        samples: The samples.
        names: Their indices, for messages.
        dataset: The name of the dataset, for messages.
        collate: The function.
        microbatch_key: The micro-batch, for the seed of the function.
    """
    try:
        if collate is not default_collate:
            seed, epoch, batch, microbatch = microbatch_key
            # Negative, so that no sample has the same seed.
            seed_all(key(seed, epoch, -1 - batch, microbatch))
        with hidden_worker_info():  # in a worker, `default_collate` allocates shared memory
            part = collate(samples)
        return part if collate is default_collate else clone_tensors(part)
    except Exception as error:
        shown = ", ".join(str(name) for name in names[:8]) + (", ..." if len(names) > 8 else "")
        which = f"sample{'s' if len(names) > 1 else ''} {shown} of {dataset}"
        return LoadFailure.of(f"collating {which}", error)


@dataclass(frozen=True)
class MapSource(Dataset[LoadedItem]):
    """Loads and collates sample by sample; can be sent to workers."""

    dataset: Any
    epoch: EpochOrder
    share: ReplicaShare
    keys: tuple[int, int]  # seed, epoch
    collate: Collate | None = None
    first: int = -1  # the first batch whose samples are checked

    def __len__(self) -> int:
        """Return the number of global batches."""
        return len(self.epoch)

    def __getitem__(self, batch: int) -> LoadedItem:
        """Load this replica's micro-batches of global batch `batch`."""
        span = self.epoch.span(batch)
        pieces = [
            ((*self.keys, batch, index), span[piece.start : piece.stop])
            for index, piece in self.share.pieces(len(span))
        ]
        loaded: dict[int, Any] = {}
        try:
            is_due = is_checked(batch, self.first)
            descriptions = self._check(span, loaded) if is_due else ()
            collate = partial(self._microbatches, loaded=loaded)
            if is_due and is_own(self.collate):
                again = partial(self._microbatches, loaded={})
                parts = collate_and_check(collate, again, pieces)
            else:
                parts = collate(pieces)
        except DatasetError as error:
            return LoadFailure(str(error), DatasetError)
        if isinstance(parts, LoadFailure):
            return parts
        return LoadedBatch(len(span), parts, descriptions)

    def _check(self, span: range, loaded: dict[int, Any]) -> tuple[str, ...]:
        """Check a few samples; put those that were loaded into `loaded`, by position."""
        positions = select_positions(span)
        names = self.epoch.indices[positions].tolist()
        seeds = dict(zip(positions, self.epoch.sample_seeds(*self.keys, positions), strict=True))

        def load(position: int) -> Any:
            index = names[positions.index(position)]
            sample = self._sample(index, seeds[position])
            loaded[position] = sample
            return sample

        return check_samples(load, positions, names, self.dataset)

    def _microbatches(
        self, pieces: Sequence[tuple[MicrobatchKey, range]], loaded: dict[int, Any]
    ) -> list[Any] | LoadFailure:
        """Load and collate micro-batches.

        Seeds are computed before, and micro-batches are collated after all samples are loaded: in
        between, the code that does this would have to be read into the processor's cache again.
        """
        if not pieces:
            return []
        name = type(self.dataset).__name__
        positions = [position for _, piece in pieces for position in piece]
        indices = self.epoch.indices[positions].tolist()
        samples = []
        seeds = self.epoch.sample_seeds(*self.keys, positions)
        for position, index, seed in zip(positions, indices, seeds, strict=True):
            try:
                known = position in loaded
                samples.append(loaded.pop(position) if known else self._sample(index, seed))
            except Exception as error:
                return LoadFailure.of(f"sample {index} of {name}", error)
        parts = []
        for microbatch_key, piece in pieces:
            # Removed, so that the memory of the samples can be used for the next micro-batch.
            first = samples[: len(piece)]
            samples = samples[len(piece) :]
            names = indices[: len(piece)]
            indices = indices[len(piece) :]
            part = collate_samples(
                first, names, name, self.collate or default_collate, microbatch_key
            )
            if isinstance(part, LoadFailure):
                return part
            parts.append(part)
        return parts

    def _sample(self, index: int, seed: int) -> Any:
        seed_all(seed)
        return self.dataset[index]


@dataclass(frozen=True)
class TensorSource:
    """Selects rows of tensors in memory: `rows[p]` is the row at position p of the order."""

    tensors: tuple[torch.Tensor, ...]
    rows: torch.Tensor
    epoch: EpochOrder
    share: ReplicaShare
    first: int = -1  # the batch whose samples are described

    @classmethod
    def of(
        cls, dataset: Any, epoch: EpochOrder, share: ReplicaShare, first: int = -1
    ) -> TensorSource | None:
        """Return a source if `dataset` is a TensorDataset, or Subsets of one; None otherwise."""
        rows = epoch.indices
        while type(dataset) is Subset:
            indices = torch.as_tensor(dataset.indices, dtype=torch.int64)
            if not _are_valid(rows, len(indices)):
                return None
            rows = indices[rows]
            dataset = dataset.dataset
        if type(dataset) is not TensorDataset or not _are_valid(rows, len(dataset)):
            return None
        if not all(_is_plain(tensor) for tensor in dataset.tensors):
            return None
        return cls(dataset.tensors, rows, epoch, share, first)

    def __getitem__(self, batch: int) -> LoadedItem:
        """Select this replica's micro-batches of global batch `batch`."""
        span = self.epoch.span(batch)
        parts: list[Any] = []
        for _, piece in self.share.pieces(len(span)):
            rows = self.rows[span.start + piece.start : span.start + piece.stop]
            parts.append([tensor.index_select(0, rows) for tensor in self.tensors])
        return LoadedBatch(len(span), parts, self._describe(span) if batch == self.first else ())

    def _describe(self, span: range) -> tuple[str, ...]:
        positions = select_positions(span)
        names = self.epoch.indices[positions].tolist()
        rows = self.rows[positions].tolist()
        return tuple(
            describe_sample(name, [tensor[row] for tensor in self.tensors])
            for name, row in zip(names, rows, strict=True)
        )


def _are_valid(rows: torch.Tensor, length: int) -> bool:
    """Return whether all rows are in range; otherwise the dataset raises its own error."""
    return len(rows) == 0 or bool(rows.min() >= 0 and rows.max() < length)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
    )
