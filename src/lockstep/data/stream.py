"""The stream: an iterable dataset, cut by position.

    stream               0 1 2 3 | 4 5 6 7 | 8 9 ...       batches of 4
    2 replicas, M = 4    0 0 1 1 | 0 0 1 1 | 0 1           who keeps which sample
    3 workers a rank     worker 0  worker 1  worker 2      who prepares which batch

Every worker of every rank iterates the whole stream, seeded by position, and
keeps what is its own. Reading is repeated; the samples, their order and their
random numbers are those of one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lockstep.data.probe import described, spread
from lockstep.data.samples import Collate, Failure, Item, Loaded, Share, collated
from lockstep.randomness import key, seed_all

__all__ = ["Stream"]


@dataclass(frozen=True)
class Stream(IterableDataset[Item]):
    """Iterates `dataset` and gives this replica's micro-batches from batch `start` on."""

    dataset: Any
    batch_size: int
    share: Share
    keys: tuple[int, int]  # seed, epoch
    start: int = 0
    collate: Collate | None = None

    def __iter__(self) -> Iterator[Item]:
        """Iterate the whole stream; give the batches that are this worker's turn."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        with _no_worker_info():
            for batch, samples in self._batches():
                if isinstance(samples, Failure):
                    # Whoever's turn it is: all workers meet the same sample, the first to be
                    # asked reports it.
                    yield samples
                    return
                if batch >= self.start and (batch - self.start) % workers == worker:
                    yield self._item(batch, samples)

    def _batches(self) -> Iterator[tuple[int, list[Any] | Failure]]:
        """Cut the stream into (number, samples); a sample that raises ends it."""
        name = type(self.dataset).__name__
        held: list[Any] = []
        stream: Iterator[Any] | None = None
        for position in count():
            try:
                if stream is None:
                    seed_all(key(*self.keys))
                    stream = iter(self.dataset)
                seed_all(key(*self.keys, position))
                held.append(next(stream))
            except StopIteration:
                break
            except Exception as error:
                yield position // self.batch_size, Failure.of(f"sample {position} of {name}", error)
                return
            if len(held) == self.batch_size:
                yield position // self.batch_size, held
                held = []
        if held:
            yield position // self.batch_size, held

    def _item(self, batch: int, samples: list[Any]) -> Item:
        first = batch * self.batch_size
        probed: tuple[str, ...] = ()
        if batch == self.start:
            numbers = spread(range(len(samples)))
            probed = tuple(described(first + number, samples[number]) for number in numbers)
        parts: list[Any] = []
        for _, piece in self.share.pieces(len(samples)):
            part = collated(
                samples[piece.start : piece.stop],
                range(first + piece.start, first + piece.stop),
                type(self.dataset).__name__,
                self.collate or default_collate,
            )
            if isinstance(part, Failure):
                return part
            parts.append(part)
        return Loaded(len(samples), parts, probed)


@contextlib.contextmanager
def _no_worker_info() -> Iterator[None]:
    """Hide torch's worker info while the dataset is iterated.

    Datasets that know torch's workers give each worker its own part of the
    stream. Here every worker cuts the whole stream itself: a dataset that cut it
    once more would lose samples.
    """
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
