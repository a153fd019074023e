"""The loader: the global batches of an epoch; each rank loads only its own micro-batches.

    order      3 0 6 2 5 1 4 ...            the same on every rank    epoch_order.py, samplers.py
    batches    3 0 6 2 | 5 1 4 ...          of the global batch size
    rank 1     . . 6 2 | . . 4 ...          loaded and collated       map_dataset.py, workers.py

The contents of a batch depend neither on the layout nor on the number of workers.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset, default_collate

from lockstep.data.consistency import (
    UNKNOWN,
    BatchIdentity,
    EpochSummary,
    pack_samples,
    require_same_epoch,
    require_same_samples,
)
from lockstep.data.epoch_order import EpochOrder, epoch_permutation, hash_indices
from lockstep.data.iterable_dataset import IterableSource
from lockstep.data.map_dataset import (
    Collate,
    Item,
    LoadedBatch,
    LoadFailure,
    MapSource,
    TensorSource,
)
from lockstep.data.microbatch import Batch, Microbatch
from lockstep.data.repeatability import count_samples, note_checked, was_checked
from lockstep.data.samplers import (
    SamplerStates,
    draw_batches,
    draw_indices,
    restore_sampler_state,
    sampler_state,
    validate_sampler,
)
from lockstep.data.workers import Items, load_in_process, load_in_workers, load_isolated
from lockstep.devices import find_accelerator
from lockstep.formatting import format_quantity
from lockstep.kernel.errors import DatasetError
from lockstep.kernel.seeds import key
from lockstep.kernel.splitting import Hosts, ReplicaShare, count_microbatches, on_one_host

__all__ = ["Agree", "Batches"]

Agree = Callable[[bytes, str], list[bytes]]
"""A function (message, subject) that exchanges messages; returns those of all ranks, in order."""

Source = TensorSource | MapSource | IterableSource
"""A loader of one replica's part of each batch."""


class Batches:
    """The global batches of one epoch, of which each rank loads its part.

    Iterating yields `Batch` objects with the micro-batches of this rank's replica. Unless a sampler
    repeats samples, each sample occurs once: nothing is padded or repeated. The last batch may be
    smaller; `drop_last` omits a smaller one. The random numbers that `dataset[i]` draws from the
    global generators of torch, Python and numpy depend only on (seed, epoch, i).

    Args:
        dataset: A map-style dataset, or an iterable dataset, which is split by position; all ranks
            must read the same stream.
        batch_size: The number of samples of a global batch, over all ranks.
        microbatches: The number of micro-batches per batch; at least `replicas`.
        replicas: The number of replicas.
        replica: The replica of this rank.
        hosts: The replicas of each host; None if all are on one.
        rank: This rank, for messages.
        seed: The random seed of order and augmentation.
        epoch: The epoch, from 0.
        shuffle: Whether to shuffle the samples.
        sampler: A sampler that determines the order instead of `shuffle`. It yields indices of
            the whole dataset, the same on all ranks.
        batch_sampler: A sampler that yields whole global batches, instead of `batch_size`,
            `shuffle`, `sampler` and `drop_last`.
        num_workers: The number of processes that load and collate. Not used for a
            `TensorDataset` without `collate_fn`, whose rows are selected in this process.
        collate_fn: A function that makes a micro-batch of a list of samples; None for torch's
            `default_collate`.
        pin_memory: Whether to copy tensors to pinned memory if there is an accelerator.
        drop_last: Whether to omit the last batch if it is smaller.
        timeout: The longest wait for a batch from the workers, in seconds.
        agree: A function that exchanges a few bytes with all ranks, so that they can compare
            their data; None for no comparison.
        sampler_states: The states of samplers from epoch to epoch.

    Raises:
        DatasetError: An argument is invalid, or, while iterating, a sample differs between two
            loads.
        LayoutError: There are more replicas than micro-batches.
        SampleError: While iterating, the dataset raises or a worker dies.
        DisagreementError: While iterating, ranks differ in their data or settings.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        microbatches: int = 8,
        replicas: int = 1,
        replica: int = 0,
        hosts: Hosts | None = None,
        rank: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 600.0,
        agree: Agree | None = None,
        sampler_states: SamplerStates | None = None,
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.seed, self.epoch, self.shuffle = seed, epoch, shuffle
        self.sampler, self.batch_sampler = sampler, batch_sampler
        self.num_workers, self.collate_fn, self.timeout = num_workers, collate_fn, timeout
        self.drop_last = drop_last
        self.pin_memory = pin_memory and find_accelerator() is not None
        self.agree = agree
        self.position = 0
        self._start = 0
        self._order, self._single_sample = "", ""
        self._planned: EpochOrder | None = None  # the order; None for an iterable dataset
        self._comparing = 0.0  # seconds spent on comparing the next batch between ranks
        self._sampler_states = sampler_states or SamplerStates()
        self._drawn_from: dict[str, Any] | None = (
            None  # the state of the sampler before the order was drawn
        )
        self._saved: dict[str, Any] | None = None
        self._share = ReplicaShare(microbatches, hosts or on_one_host(replicas), replica)
        self._who = f"rank {rank}" if rank is not None else f"replica {replica}"
        self._name = type(dataset).__name__
        self._iterable = _is_iterable(dataset)
        self._check()

    def __len__(self) -> int:
        """Return the number of batches in the whole epoch."""
        if self.batch_sampler is not None:
            return len(cast("Sequence[Any]", self.batch_sampler))
        samples = len(cast("Sequence[Any]", self.dataset if self.sampler is None else self.sampler))
        size = cast(int, self.batch_size)
        return samples // size if self.drop_last else -(-samples // size)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the epoch, from the loaded position or from the beginning."""
        start, self._start = self._start, 0
        self.position = start
        begun = perf_counter()
        with closing(self._all_items(start)) as items:
            for item, source in items:
                batch = self._batch(item, source, perf_counter() - begun - self._comparing)
                self.position += 1
                yield batch
                begun = perf_counter()
        if self.position == 0:
            few = f"fewer than {self.batch_size} samples" if self.drop_last else "no samples"
            raise DatasetError(f"the dataset {self._name} has {few}")

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch as JSON values, valid for any layout.

        `position` counts the batches that were returned; batches that workers have prepared ahead
        are prepared again. `order` is a digest of the order of the epoch. `sampler` is the state
        of the sampler before the order was drawn: its private generators and `state_dict`.
        """
        given = self.user_sampler()
        drawn_from = self._drawn_from
        if drawn_from is None:
            drawn_from = {} if given is None else sampler_state(given)
        return {
            "position": self.position,
            **self._identity(),
            "order": self._order,
            "sampler": drawn_from,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next iteration from a saved position.

        Raises:
            DatasetError: The state belongs to another number of samples, batch size, seed, epoch,
                `shuffle` or `drop_last`. If the order differs, the next iteration raises the error.
        """
        for name, here in self._identity().items():
            saved = state.get(name, False)  # older states lack drop_last
            if saved != here:
                raise DatasetError(
                    f"the saved position belongs to {name.replace('_', ' ')} {saved}, "
                    f"but these batches have {here}"
                )
        self.position = self._start = int(state["position"])
        self._saved = dict(state)
        self._order, self._drawn_from = state.get("order", ""), state.get("sampler", {})

    def user_sampler(self) -> Any:
        """Return the user's sampler or batch sampler; None if there is none."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    def _identity(self) -> dict[str, int | bool | None]:
        return {
            "samples": _length(self.dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "epoch": self.epoch,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def _check(self) -> None:
        size = self.batch_size
        if self.batch_sampler is None and size is None:
            raise DatasetError(
                "the global batch size is missing: pass batch_size=, the number of samples of a "
                "batch over all ranks"
            )
        if size is not None and (not hasattr(size, "__index__") or size < 1):
            raise DatasetError(f"the global batch size is {size!r}; it must be an integer from 1")
        if self.batch_sampler is not None and not (
            size is None and self.sampler is None and not self.drop_last
        ):
            raise DatasetError(
                "a batch_sampler yields whole batches: omit batch_size, sampler and drop_last"
            )
        given = self.user_sampler()
        if self._iterable and given is not None:
            raise DatasetError(
                f"{self._name} is iterable, and iterable datasets cannot take a sampler"
            )
        if not self._iterable and given is None and _length(self.dataset) == 0:
            raise DatasetError(f"the dataset {self._name} is empty")
        validate_sampler(given)
        if self.num_workers < 0 or self.timeout <= 0:
            raise DatasetError("num_workers must not be negative, and timeout must be positive")
        if self.num_workers > 0 and multiprocessing.current_process().daemon:
            raise DatasetError(
                "a daemon process cannot start loader workers; use num_workers=0, "
                "or start the ranks with daemon=False"
            )

    def enter_share(self, share: ReplicaShare, rank: int) -> None:
        """Load the micro-batches of another share from now on; the order does not change."""
        self._share = share
        self._who = f"rank {rank}"

    def _all_items(self, start: int) -> Generator[tuple[Item, Source], None, None]:
        """Yield the items from batch `start` on, each with the source that loaded it."""
        source = self._open(start)
        items = self._compare_samples(self._items(source, start))
        while True:
            with closing(items):
                for item in items:
                    yield item, source
                    if self._share != source.share:
                        break  # `enter_share` was called meanwhile
                else:
                    return
            source = self._make_source(self.position)
            items = self._items(source, self.position)

    def _open(self, start: int) -> Source:
        """Compare the epoch with all ranks, and return its source from batch `start` on."""
        if self._iterable:
            self._compare_epoch(start, None)
            return self._make_source(start)
        epoch = self._planned = self._plan_epoch(start)
        # A batch of fewer than 2 M samples has a micro-batch of one sample.
        if (found := epoch.find_smaller(2 * self._share.microbatches, start)) is not None:
            size = format_quantity(len(epoch.span(found)), "sample")
            self._single_sample = f"batch {found} of epoch {self.epoch} ({size})"
        return self._make_source(start, is_compared=True)

    def _make_source(self, start: int, *, is_compared: bool = False) -> Source:
        keys, share, collate = (self.seed, self.epoch), self._share, self.collate_fn
        is_own = collate is not None and collate is not default_collate
        is_unchecked = is_own and not was_checked(collate)
        if self._iterable:
            size = cast(int, self.batch_size)
            return IterableSource(
                self.dataset, size, share, keys, start, collate, self.drop_last, is_unchecked
            )
        assert self._planned is not None
        first = start if is_compared else -1
        if collate is None:
            tensors = TensorSource.of(self.dataset, self._planned, share, first)
            if tensors is not None:
                return tensors
        checks = count_samples(self.dataset)
        return MapSource(
            self.dataset, self._planned, share, keys, collate, first, checks, is_unchecked
        )

    def _items(self, source: Source, start: int) -> Items:
        """Return the items of the batches from `start` on."""
        if isinstance(source, IterableSource):
            return self._prepare(source, None)
        numbers = range(start, len(source.epoch))
        if isinstance(source, TensorSource):
            return load_in_process((source[number] for number in numbers), self.pin_memory)
        return self._prepare(source, numbers)

    def _load_again(
        self, source: Source, number: int, share: ReplicaShare
    ) -> tuple[Microbatch, ...]:
        """Load batch `number` for another share, in this process."""
        if isinstance(source, IterableSource):
            again = replace(source, share=share, start=number, checks_collate=False)
            items = load_isolated(again, self.pin_memory)
        else:
            found = replace(source, share=share, first=-1)
            load = load_in_process if isinstance(source, TensorSource) else load_isolated
            items = load((found[each] for each in (number,)), self.pin_memory)
        with closing(items):
            size, parts = self._require_loaded(next(items), number)
        return tuple(
            Microbatch(index, len(piece), part)
            for (index, piece), part in zip(share.pieces(size), parts, strict=True)
        )

    def _require_loaded(self, item: Item, number: int) -> tuple[int, list[Any]]:
        """Return the size and the parts of an item; raise the error of a failed item."""
        if isinstance(item, LoadFailure):
            raise item.error(f"{item.message} ({self._who}, batch {number})")
        return item.size, item.parts

    def _compare_samples(self, items: Items) -> Items:
        """Compare a few samples with all ranks before the first item is returned."""
        with closing(items):
            try:
                item = next(items, None)
            except Exception:
                self._exchange_samples(())  # the other ranks wait for this message
                raise
            begun = perf_counter()
            descriptions = item.descriptions if isinstance(item, LoadedBatch) else ()
            require_same_samples(self._exchange_samples(descriptions))
            if descriptions:
                note_checked(self.dataset, self.collate_fn)
            self._comparing = perf_counter() - begun
            if item is not None:
                yield item
                del item  # free its memory
                self._comparing = 0.0
                yield from items

    def _exchange_samples(self, descriptions: Sequence[str]) -> list[bytes]:
        message = pack_samples(descriptions)
        return [message] if self.agree is None else self.agree(message, "comparing samples of")

    def _prepare(self, source: MapSource | IterableSource, numbers: range | None) -> Items:
        if self.num_workers > 0:
            seed = key(self.seed, self.epoch)
            workers, pin = self.num_workers, self.pin_memory
            return load_in_workers(source, numbers, workers, pin, self.timeout, seed)
        if isinstance(source, IterableSource):
            return load_isolated(source, self.pin_memory)
        return load_isolated((source[number] for number in numbers or ()), self.pin_memory)

    def _plan_epoch(self, start: int) -> EpochOrder:
        """Determine the order of the epoch, and check that it is the same on all ranks."""
        try:
            epoch = self._make_order() if self.user_sampler() is None else self._draw_order()
            self._order = epoch.digest().hex()
            self._require_saved_order(start)
        except BaseException:
            if self.agree is not None:
                # The other ranks wait for this message.
                self.agree(EpochSummary().pack(), "beginning")
            raise
        self._compare_epoch(start, epoch)
        return epoch

    def _draw_order(self) -> EpochOrder:
        """Draw the order from the sampler, after restoring its saved state if there is one."""
        sampler = self.user_sampler()
        if self._saved is not None:
            restore_sampler_state(sampler, self._saved.get("sampler", {}))
        else:
            self._sampler_states.resume(sampler, self.epoch)
        self._drawn_from = sampler_state(sampler)
        epoch = self._make_order()
        self._sampler_states.record(self.epoch, self._drawn_from, sampler_state(sampler))
        return epoch

    def _require_saved_order(self, start: int) -> None:
        """Raise DatasetError if the order differs from that of the saved position."""
        saved, self._saved = self._saved, None
        if saved is None or saved.get("order", "") in ("", self._order):
            return
        sampler = self.user_sampler()
        cause = (
            "the dataset or the version of torch has changed"
            if sampler is None
            else f"the sampler {type(sampler).__name__} has changed, or has state that cannot be "
            "restored: let it draw from the global generators of torch, Python or numpy, which "
            "are seeded for each epoch, or implement state_dict() and load_state_dict()"
        )
        raise DatasetError(
            f"the order of epoch {self.epoch} differs from that of the saved position before batch "
            f"{start}; {cause}"
        )

    def _make_order(self) -> EpochOrder:
        if self.batch_sampler is not None:
            return draw_batches(self.batch_sampler, self.seed, self.epoch)
        size = cast(int, self.batch_size)
        if self.sampler is not None:
            return draw_indices(self.sampler, size, self.seed, self.epoch, self.drop_last)
        order = epoch_permutation(len(self.dataset), self.seed, self.epoch, self.shuffle)
        return EpochOrder.from_indices(order, size, self.drop_last)

    def _compare_epoch(self, start: int, epoch: EpochOrder | None) -> None:
        if self.agree is None:
            return
        samples = _length(self.dataset)
        description = EpochSummary(
            ready=1,
            samples=UNKNOWN if samples is None else samples,
            batch_size=UNKNOWN if self.batch_size is None else self.batch_size,
            drop_last=int(self.drop_last),
            microbatches=self._share.microbatches,
            seed=self.seed,
            epoch=self.epoch,
            position=start,
            batches=UNKNOWN if epoch is None else len(epoch),
            order=bytes.fromhex(self._order) if epoch is not None else bytes(16),
        )
        require_same_epoch(self.agree(description.pack(), "beginning"))

    def _batch(self, item: Item, source: Source, seconds: float) -> Batch:
        size, parts = self._require_loaded(item, self.position)
        share = source.share
        single_sample, self._single_sample = self._single_sample, ""
        if self._planned is not None:
            indices = self._planned.batch_indices(self.position)
            samples = hash_indices(indices)
        else:  # an iterable dataset: hash the positions in the stream
            indices, first = None, self.position * cast(int, self.batch_size)
            samples = hash_indices(torch.arange(first, first + size))
        return Batch(
            size=size,
            leaves=count_microbatches(size, self._share.microbatches),
            microbatches=tuple(
                Microbatch(index, len(piece), part)
                for (index, piece), part in zip(share.pieces(size), parts, strict=True)
            ),
            epoch=self.epoch,
            seconds=seconds,
            identity=BatchIdentity(self.epoch, self.position, self._order, samples=samples),
            single_sample=single_sample,
            indices=indices,
            share=share,
            load=partial(self._load_again, source, self.position),
        )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _is_iterable(dataset: Any) -> bool:
    """Return whether a dataset is iterable; raise DatasetError if it is not a dataset."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__"):
        if _length(dataset) is None:
            raise DatasetError(f"the dataset {name} has no length; define __len__")
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise DatasetError(f"{name} is not a dataset: it has neither __getitem__ nor __iter__")
