"""A batch sampler for torch's DataLoader that yields the micro-batches of one rank.

    epoch order    3 0 6 2 5 1 4 7 | 8 ...     batch 0 of 8 samples, M = 4, two ranks
    rank 0         [3 0] [6 2]                 micro-batches 0, 1
    rank 1         [5 1] [4 7]                 micro-batches 2, 3

The order depends only on (samples, seed, epoch), and a micro-batch has the same samples on any
number of ranks. Each list of indices seeds the generators before it yields a sample's index, so
that a sample is loaded with the same random numbers in any process, also in a loader worker. The
order, the split and the seeds are those of `Trainer.batches`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import Sampler, TensorDataset, get_worker_info

from lockstep.data.assignment import ReplicaShare
from lockstep.data.epoch_order import EpochOrder, epoch_permutation
from lockstep.data.repeated_epoch import describe_repetition
from lockstep.kernel.errors import DatasetError, LayoutError
from lockstep.kernel.seeds import key, remembered, seed_all
from lockstep.messages import log

__all__ = ["LoadedHere", "MicrobatchConsumer", "MicrobatchSampler", "PlannedMicrobatch"]


class PlannedMicrobatch(NamedTuple):
    """A micro-batch of this rank.

    Attributes:
        number: Its number in the batch.
        size: The number of its samples.
        samples: The number of samples of the batch.
        leaves: The number of micro-batches of the batch.
        epoch: The epoch.
        batch: The number of the batch in the epoch.
        batches: The number of batches of the epoch.
        order: A digest of the epoch's order.
    """

    number: int
    size: int
    samples: int
    leaves: int
    epoch: int = 0
    batch: int = 0
    batches: int = 0
    order: str = ""


class MicrobatchConsumer(Protocol):
    """What trains on the micro-batches of a sampler, in the order in which they are yielded."""

    def begin_epoch(self) -> None:
        """Discard the micro-batches of an earlier iteration."""

    def plan(self, microbatch: PlannedMicrobatch) -> None:
        """Expect a micro-batch after those that were planned before."""


class LoadedHere:
    """The generators of this process, which loading a micro-batch in it has seeded."""

    restore: Callable[[], None] | None = None
    """Restores their states from before the loading; None if nothing was loaded since."""

    @classmethod
    def end(cls) -> bool:
        """Restore the generators; return whether something was loaded."""
        restore, cls.restore = cls.restore, None
        if restore is not None:
            restore()
        return restore is not None


class SeededIndices(list[int]):
    """The indices of a micro-batch's samples; iterating over them seeds the generators for each.

    A DataLoader iterates over the list in the process that loads the samples, and collates them
    when the list has ended; then the generators are seeded for a `collate_fn` of the user.

    Args:
        indices: The indices.
        seeds: The seed of each sample, and that of the `collate_fn`.
    """

    def __init__(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        super().__init__(indices)
        self.seeds = seeds

    def __iter__(self) -> Iterator[int]:
        """Yield each index after seeding the generators; use one thread, as in a worker."""
        if get_worker_info() is None and LoadedHere.restore is None:
            LoadedHere.restore = remembered(everything=True)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for index, seed in zip(super().__iter__(), self.seeds, strict=False):
                seed_all(seed)
                yield index
        finally:
            torch.set_num_threads(threads)
        seed_all(self.seeds[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the list without iterating over it."""
        return SeededIndices, (self[:], self.seeds)


class MicrobatchSampler(Sampler[list[int]]):
    """Yields the indices of each micro-batch of this rank; `exact.sampler` returns it.

    Use it as the `batch_sampler` of a DataLoader, and call `set_epoch` before each epoch.

    Args:
        dataset: A map-style dataset.
        batch_size: The number of samples of a batch, over all ranks.
        shuffle: Whether the order is a new permutation in each epoch.
        seed: The random seed of the order and of the samples.
        drop_last: Whether a smaller last batch is left out.
        share: The micro-batches of this rank.

    Attributes:
        epoch: The epoch of the next iteration.
        start: The first batch of the next iteration; not 0 after a resume.
        settings: The arguments, which ranks compare.

    Raises:
        DatasetError: The dataset has no length or no samples, or `drop_last` leaves no batch.
        LayoutError: The last batch has fewer samples than there are ranks.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        share: ReplicaShare,
    ) -> None:
        name = type(dataset).__name__
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DatasetError(
                f"{name} has no length or no dataset[index], so it cannot be divided among ranks: "
                "pass a map-style dataset"
            )
        self._samples, self._batch_size = len(dataset), batch_size
        if not self._samples or batch_size < 1:
            raise DatasetError(f"{name} of {self._samples} samples, batch_size={batch_size}")
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._share, self._is_random = share, type(dataset) is not TensorDataset
        self._consumers: list[MicrobatchConsumer] = []
        self.epoch = self.start = 0
        self._finished, self._has_warned = -1, False
        self.settings = (
            f"dataset of {self._samples}, batch_size={batch_size}, shuffle={shuffle}, seed={seed}, "
            f"drop_last={drop_last}"
        )
        order = EpochOrder.from_indices(torch.arange(self._samples), batch_size, drop_last)
        self._sizes = [len(order.span(batch)) for batch in (0, len(order) - 1)]
        self.batches = len(order)
        if min(self._sizes) >= share.replicas:
            leaves = min(self._sizes[1], share.microbatches)
            share.require_turns(leaves, leaves)
        else:
            raise LayoutError(
                f"the last batch of an epoch has {self._sizes[1]} samples, fewer than the "
                f"{share.replicas} ranks: pass drop_last=True, or change the batch_size"
            )

    def attach(self, consumer: MicrobatchConsumer) -> None:
        """Let another `ls.exact`, such as that of a discriminator, train on the same batches."""
        self._consumers.append(consumer)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; a resumed epoch goes on where it was saved."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        """Return the number of micro-batches of this rank in a whole epoch."""
        first, last = (len(self._share.pieces(size)) for size in self._sizes)
        return first * (self.batches - 1) + last

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each micro-batch of this rank."""
        epoch, start, self.start = self.epoch, self.start, 0
        if epoch == self._finished and not (start or self._has_warned):
            self._warn()
        permutation = epoch_permutation(self._samples, self._seed, epoch, self._shuffle)
        order = EpochOrder.from_indices(permutation, self._batch_size, self._drop_last)
        digest = order.digest().hex()
        for consumer in self._consumers:
            consumer.begin_epoch()
        for batch in range(start, len(order)):
            span, indices = order.span(batch), order.batch_indices(batch).tolist()
            pieces = self._share.pieces(len(span))
            leaves = min(len(span), self._share.microbatches)
            for microbatch, piece in pieces:
                planned = PlannedMicrobatch(
                    microbatch,
                    len(piece),
                    len(span),
                    leaves,
                    epoch,
                    batch,
                    self.batches,
                    digest,
                )
                for consumer in self._consumers:
                    consumer.plan(planned)
                part = indices[piece.start : piece.stop]
                if not self._is_random:
                    yield part
                    continue
                seeds = [key(self._seed, epoch, index) for index in part]
                seeds.append(key(self._seed, epoch, -1 - batch, microbatch))
                yield SeededIndices(part, seeds)
        self._finished = epoch

    def _warn(self) -> None:
        """Warn that an epoch is repeated, if that repeats random numbers."""
        if self._share.replica == 0 and (self._shuffle or self._is_random):
            advice = "call set_epoch(epoch) of exact.sampler(...) before each epoch"
            self._has_warned = True
            log(": ".join(describe_repetition(self.epoch, advice, sys._getframe())))
