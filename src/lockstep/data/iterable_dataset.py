"""Loading of an iterable dataset, which is split by position.

    stream                0 1 2 3 | 4 5 6 7 | 8 9 ...       batches of 4
    2 replicas, M = 4     0 0 1 1 | 0 0 1 1 | 0 1           the replica that keeps the sample
    3 workers per rank    worker 0  worker 1  worker 2      the worker that prepares the batch

Every worker of every rank iterates over the whole stream, seeded by position, and keeps only its
own samples. Reading is repeated, but samples, order and random numbers are those of one process.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from lockstep.data.assignment import ReplicaShare
from lockstep.data.map_dataset import (
    Collate,
    LoadedBatch,
    LoadedItem,
    LoadFailure,
    collate_samples,
    hidden_worker_info,
)
from lockstep.data.repeatability import (
    BegunStream,
    StreamCheck,
    collate_and_check,
    describe_sample,
    is_checked,
    select_positions,
)
from lockstep.kernel.errors import DatasetError, LockstepError, SampleError
from lockstep.kernel.seeds import key, seed_all

__all__ = ["IterableSource"]


@dataclass(frozen=True)
class IterableSource(IterableDataset[LoadedItem]):
    """Iterates over a dataset; yields the micro-batches of one replica from batch `start` on."""

    dataset: Any
    batch_size: int
    share: ReplicaShare
    keys: tuple[int, int]  # seed, epoch
    start: int = 0
    collate: Collate | None = None
    drop_last: bool = False
    checks_collate: bool = False  # whether to check the collate function

    def __iter__(self) -> Iterator[LoadedItem]:
        """Iterate over the whole stream, and yield the batches of this worker."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        # A dataset that uses the worker info yields a different part of the stream in each worker.
        # Here every worker splits the whole stream itself, so samples would be lost.
        with hidden_worker_info():
            try:
                for batch, samples in self._batches():
                    if batch >= self.start and (batch - self.start) % workers == worker:
                        yield self._item(batch, samples)
            except LockstepError as error:
                # All workers fail at the same sample, so each of them may report it.
                yield LoadFailure(str(error), type(error))

    def _batches(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield (number, samples) of each batch.

        Raises:
            SampleError: The dataset raises.
            DatasetError: The dataset yields something else when it is iterated again.
        """
        pending: list[Any] = []
        stream: Iterator[Any] | None = None
        check = StreamCheck(self.dataset, self._begin)
        for position in count():
            try:
                if stream is None:
                    stream, sample = check.begin()
                else:
                    seed_all(key(*self.keys, position))
                    sample = next(stream)
                pending.append(sample)
            except StopIteration:
                break
            except LockstepError:
                raise
            except Exception as error:
                name = f"sample {position} of {type(self.dataset).__name__}"
                raise SampleError(LoadFailure.of(name, error).message) from None
            if len(pending) == self.batch_size:
                yield position // self.batch_size, pending
                pending = []
        if pending and not self.drop_last:
            yield position // self.batch_size, pending
        if position:
            check.end()

    def _begin(self) -> BegunStream:
        """Return a new iterator over the dataset, and its first sample."""
        seed_all(key(*self.keys))
        stream = iter(self.dataset)
        seed_all(key(*self.keys, 0))
        return stream, next(stream)

    def _item(self, batch: int, samples: list[Any]) -> LoadedItem:
        first = batch * self.batch_size
        descriptions: tuple[str, ...] = ()
        if batch == self.start:
            numbers = select_positions(range(len(samples)))
            descriptions = tuple(
                describe_sample(first + number, samples[number]) for number in numbers
            )
        pieces = self.share.pieces(len(samples))
        kept = None
        if self.checks_collate and is_checked(batch, self.start) and pieces:
            with contextlib.suppress(Exception):  # samples that cannot be copied are not checked
                kept = copy.deepcopy(samples[: pieces[0][1].stop])
        collate = partial(self._collate, batch, samples)
        if kept is None:
            parts = collate(pieces)
        else:
            again = partial(self._collate, batch, kept)
            try:
                parts = collate_and_check(collate, again, pieces)
            except DatasetError as error:
                parts = LoadFailure(str(error), DatasetError)
        if isinstance(parts, LoadFailure):
            return parts
        return LoadedBatch(len(samples), parts, descriptions)

    def _collate(
        self, batch: int, samples: list[Any], pieces: Sequence[tuple[int, range]]
    ) -> list[Any] | LoadFailure:
        """Collate some micro-batches of a batch."""
        first = batch * self.batch_size
        parts: list[Any] = []
        for index, piece in pieces:
            part = collate_samples(
                samples[piece.start : piece.stop],
                range(first + piece.start, first + piece.stop),
                type(self.dataset).__name__,
                self.collate or default_collate,
                (*self.keys, batch, index),
            )
            if isinstance(part, LoadFailure):
                return part
            parts.append(part)
        return parts
