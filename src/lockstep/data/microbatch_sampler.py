"""A batch sampler for torch's DataLoader that yields the micro-batches of one rank.

    epoch order    3 0 6 2 5 1 4 7 | 8 ...     batch 0 of 8 samples, M = 4, two ranks
    rank 0         [3 0] [6 2]                 micro-batches 0, 1
    rank 1         [5 1] [4 7]                 micro-batches 2, 3

The order depends only on (samples, seed, epoch), and a micro-batch has the same samples on any
number of ranks. Each list of indices seeds the generators before it yields a sample's index, so
that a sample is loaded with the same random numbers in any process, also in a loader worker. The
order, the split and the seeds are those of `Trainer.batches`.

The lists of a batch sampler are micro-batches as they are, M of them a batch. If fewer are left at
the end of an epoch, they are joined and split like any other batch:

    M = 4       [3 0 6] [2 5] [1 4] [7 8 9] | [10 11 12] [13]  ->  [10] [11] [12] [13]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

from torch.utils.data import Sampler, TensorDataset, get_worker_info

from lockstep.data.assignment import ReplicaShare
from lockstep.data.epoch_order import EpochOrder, epoch_permutation
from lockstep.data.repeatability import is_checked, select_positions
from lockstep.data.repeated_epoch import describe_repetition
from lockstep.data.samplers import draw_batches, draw_indices, validate_sampler
from lockstep.kernel.errors import DatasetError
from lockstep.kernel.seeds import key, remembered, seed_all
from lockstep.kernel.splitting import count_microbatches, split_evenly
from lockstep.messages import log
from lockstep.processor_core import one_thread

__all__ = [
    "LoadedHere",
    "MicrobatchConsumer",
    "MicrobatchSampler",
    "MicrobatchSource",
    "PlannedMicrobatch",
    "SeededIndices",
]


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
    """Trains on the micro-batches of a sampler, in the order in which they are yielded."""

    def begin_epoch(self) -> None:
        """Discard the micro-batches of an earlier iteration."""

    def plan(self, microbatch: PlannedMicrobatch) -> None:
        """Expect a micro-batch after those that were planned before."""

    def leave(self) -> None:
        """Undo what was begun, as the loop was left before the end of the epoch."""


class MicrobatchSource(Protocol):
    """Yields micro-batches, and tells consumers before it loads them.

    Attributes:
        epoch: The epoch of the next iteration.
        start: The first batch of the next iteration.
        settings: The arguments, which ranks compare.
    """

    epoch: int
    start: int
    settings: str

    def attach(self, consumer: MicrobatchConsumer) -> None:
        """Tell a consumer which micro-batches follow."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""


class LoadedHere:
    """The generators of this process, which loading a micro-batch in it has seeded."""

    restore: Callable[[], None] | None = None
    """Restores their states from before the loading; None if nothing was loaded since."""

    @classmethod
    def end(cls) -> bool:
        """Restore the generators; return whether something was loaded."""
        restore = cls.restore
        cls.restore = None
        if restore is not None:
            restore()
        return restore is not None


class SeededIndices(list[int]):
    """The indices of a micro-batch's samples; iterating over them seeds the generators for each.

    A DataLoader iterates over the list in the process that loads the samples, and collates them
    when the list has ended; then the generators are seeded for a `collate_fn` of the user.

    Args:
        indices: The indices.
        seeds: The seed of each sample; empty if loading draws no random numbers.
        collate_seed: The seed of the `collate_fn`.
        checks: The index and the seed of each sample to load twice (`checked_loading`).

    Attributes:
        loaded: The list whose samples this process has loaded last.
    """

    loaded: ClassVar[SeededIndices | None] = None

    def __init__(
        self,
        indices: Sequence[int],
        seeds: Sequence[int],
        collate_seed: int,
        checks: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(indices)
        self.seeds = seeds
        self.collate_seed = collate_seed
        self.checks = checks

    def __iter__(self) -> Iterator[int]:
        """Yield each index after seeding the generators; use one thread, as in a worker."""
        if get_worker_info() is None and LoadedHere.restore is None:
            LoadedHere.restore = remembered(everything=True)
        with one_thread():
            for position, index in enumerate(super().__iter__()):
                if self.seeds:
                    seed_all(self.seeds[position])
                yield index
        seed_all(self.collate_seed)
        SeededIndices.loaded = self

    def without_checks(self) -> SeededIndices:
        """Return the list for loading its samples again."""
        return SeededIndices(self[:], self.seeds, self.collate_seed)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the list without iterating over it."""
        return SeededIndices, (self[:], self.seeds, self.collate_seed, self.checks)


@dataclass(frozen=True)
class EpochPlan:
    """The order of an epoch, and how its batches are cut into micro-batches.

    Attributes:
        order: The order, in batches or, of a batch sampler, in micro-batches.
        microbatches: The number of micro-batches of a batch.
        keeps_lists: Whether the order is in micro-batches.
    """

    order: EpochOrder
    microbatches: int
    keeps_lists: bool = False

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(self.order) // self.microbatches) if self.keeps_lists else len(self.order)

    def cut(self, batch: int) -> Sequence[range]:
        """Return the positions of each micro-batch of a batch."""
        if self.keeps_lists:
            begin = batch * self.microbatches
            lists = range(begin, min(begin + self.microbatches, len(self.order)))
            if len(lists) == self.microbatches:
                return [self.order.span(number) for number in lists]
            whole = range(self.order.span(lists[0]).start, self.order.span(lists[-1]).stop)
        else:
            whole = self.order.span(batch)
        parts = split_evenly(len(whole), count_microbatches(len(whole), self.microbatches))
        return [whole[part.start : part.stop] for part in parts]

    def require_enough(self, share: ReplicaShare) -> EpochPlan:
        """Return itself; LayoutError unless every rank has a micro-batch of the last batch."""
        spans = self.cut(len(self) - 1)
        share.require_samples(spans[-1].stop - spans[0].start)
        share.require_turns(len(spans), len(spans))
        return self

    def choose_checks(
        self, seed: int, epoch: int, spans: Sequence[range]
    ) -> Sequence[tuple[int, int]]:
        """Return the index and the seed of some samples of a batch, the same on every rank."""
        positions = select_positions(range(spans[0].start, spans[-1].stop))
        seeds = self.order.sample_seeds(seed, epoch, positions)
        return tuple(zip(self.order.indices[positions].tolist(), seeds, strict=True))


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
        sampler: A sampler that determines the order instead of `shuffle`, the same on all ranks.
        batch_sampler: A sampler that yields micro-batches, instead of `batch_size`, `shuffle`,
            `sampler` and `drop_last`.

    Attributes:
        epoch: The epoch of the next iteration.
        start: The first batch of the next iteration; not 0 after a resume.
        settings: The arguments, which ranks compare.
        has_random_collate: Whether the `collate_fn` of the DataLoader may draw random numbers.

    Raises:
        DatasetError: The dataset has no length or no samples, `drop_last` leaves no batch, or the
            order of a sampler cannot be the same on every rank.
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
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
    ) -> None:
        name = type(dataset).__name__
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DatasetError(
                f"{name} has no length or no dataset[index], so it cannot be divided among ranks: "
                "pass a map-style dataset"
            )
        samples = len(dataset)
        if not samples or batch_size < 1:
            raise DatasetError(f"{name} of {samples} samples, batch_size={batch_size}")
        self._seed = seed
        self._share = share
        self._is_random = type(dataset) is not TensorDataset
        self._consumers: list[MicrobatchConsumer] = []
        self.epoch = 0
        self.start = 0
        self.has_random_collate = True
        self._finished = -1
        self._has_warned = False
        self._iterations = 0
        self._repeats = shuffle or self._is_random  # random numbers, if an epoch is repeated
        self.settings = (
            f"dataset of {samples}, batch_size={batch_size}, shuffle={shuffle}, seed={seed}, "
            f"drop_last={drop_last}"
        )
        self._known: tuple[int, EpochPlan] | None = None  # an epoch and its plan
        given = sampler if batch_sampler is None else batch_sampler
        if given is not None:
            validate_sampler(given)
            self.settings += f", {type(given).__name__}"
        self._draw: Callable[[int], EpochOrder]
        if batch_sampler is not None:
            self._draw = partial(draw_batches, batch_sampler, seed)
        elif sampler is not None:
            self._draw = partial(draw_indices, sampler, batch_size, seed, drop_last=drop_last)
        else:
            self._draw = partial(_permute, samples, batch_size, seed, shuffle, drop_last)
        self._keeps_lists = batch_sampler is not None
        if given is None:  # all epochs have the same sizes
            self._make_plan(0)

    def attach(self, consumer: MicrobatchConsumer) -> None:
        """Let another `ls.exact`, such as that of a discriminator, train on the same batches."""
        self._consumers.append(consumer)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; a resumed epoch goes on where it was saved."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.start = 0

    @property
    def batches(self) -> int:
        """The number of batches of the epoch, the same for any number of ranks."""
        return len(self._make_plan(self.epoch))

    def __len__(self) -> int:
        """Return the number of micro-batches of this rank in the whole epoch."""
        plan = self._make_plan(self.epoch)
        return sum(len(self._own(plan.cut(batch))) for batch in range(len(plan)))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each micro-batch of this rank."""
        self._iterations += 1
        number = self._iterations
        try:
            yield from self._iterate()
        except GeneratorExit:  # after `break`, or an exception in the body of the loop
            if number == self._iterations:  # and not a forgotten one, which is freed only now
                LoadedHere.end()
                for consumer in self._consumers:
                    consumer.leave()
            raise
        LoadedHere.end()  # if the last micro-batch was not trained

    def _iterate(self) -> Iterator[list[int]]:
        epoch = self.epoch
        start = self.start
        self.start = 0
        if epoch == self._finished and not (start or self._has_warned):
            self._warn()
        plan = self._make_plan(epoch)
        order = plan.order
        digest = plan.order.digest().hex()
        for consumer in self._consumers:
            consumer.begin_epoch()
        for batch in range(start, len(plan)):
            spans = plan.cut(batch)
            samples = spans[-1].stop - spans[0].start
            is_due = is_checked(batch, start)
            checks = plan.choose_checks(self._seed, epoch, spans) if is_due else ()
            for microbatch in self._own(spans):
                span = spans[microbatch]
                planned = PlannedMicrobatch(
                    number=microbatch,
                    size=len(span),
                    samples=samples,
                    leaves=len(spans),
                    epoch=epoch,
                    batch=batch,
                    batches=len(plan),
                    order=digest,
                )
                for consumer in self._consumers:
                    consumer.plan(planned)
                indices = order.indices[span.start : span.stop].tolist()
                if not (self._is_random or self.has_random_collate or checks):
                    yield indices
                    continue
                seeds = order.sample_seeds(self._seed, epoch, span) if self._is_random else ()
                collate_seed = key(self._seed, epoch, -1 - batch, microbatch)
                yield SeededIndices(indices, seeds, collate_seed, checks)
                checks = ()  # those of the first micro-batch are enough
        self._finished = epoch

    def _make_plan(self, epoch: int) -> EpochPlan:
        if self._known is None or self._known[0] != epoch:
            plan = EpochPlan(self._draw(epoch), self._share.microbatches, self._keeps_lists)
            self._known = epoch, plan.require_enough(self._share)
        return self._known[1]

    def _own(self, spans: Sequence[range]) -> range:
        """Return the numbers of this rank's micro-batches."""
        return self._share.spans(len(spans))[self._share.replica]

    def _warn(self) -> None:
        """Warn that an epoch is repeated, if that repeats random numbers."""
        if self._share.replica == 0 and self._repeats:
            advice = "call set_epoch(epoch) of exact.sampler(...) before each epoch"
            self._has_warned = True
            log(": ".join(describe_repetition(self.epoch, advice, sys._getframe())))


def _permute(
    samples: int, batch_size: int, seed: int, shuffle: bool, drop_last: bool, epoch: int
) -> EpochOrder:
    """Return the order of an epoch without a sampler."""
    permutation = epoch_permutation(samples, seed, epoch, shuffle)
    return EpochOrder.from_indices(permutation, batch_size, drop_last)
