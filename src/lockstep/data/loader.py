"""The loader: the global batches of an epoch; each rank loads only its own micro-batches.

    order      3 0 6 2 5 1 4 ...            the same on every rank    epoch_order.py, samplers.py
    batches    3 0 6 2 | 5 1 4 ...          of the global batch size
    rank 1     . . 6 2 | . . 4 ...          loaded and collated       map_dataset.py, workers.py

The contents of a batch depend neither on the layout nor on the number of workers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol, cast

import torch

from lockstep.comm.activity import Waited
from lockstep.data.assignment import Hosts, ReplicaShare, on_one_host
from lockstep.data.consistency import (
    ORDER,
    BatchIdentity,
    GatherFn,
    compare_first,
    pack_described,
    require_same_epoch,
)
from lockstep.data.epoch_order import EpochOrder, hash_indices
from lockstep.data.iterable_dataset import IterableSource
from lockstep.data.loader_options import LoaderOptions, count_samples_of
from lockstep.data.map_dataset import (
    LoadedBatch,
    LoadedItem,
    LoadFailure,
    MapSource,
    TensorSource,
    is_own,
)
from lockstep.data.microbatch import Batch, Microbatch
from lockstep.data.workers import Items, load_in_process, load_in_workers, load_isolated
from lockstep.devices import find_accelerator
from lockstep.kernel.errors import DatasetError
from lockstep.kernel.seeds import key
from lockstep.kernel.splitting import count_microbatches

__all__ = ["Batches", "EpochBatches"]

Source = TensorSource | MapSource | IterableSource
"""A loader of one replica's part of each batch."""


class EpochBatches(Protocol):
    """The global batches of one epoch, and the position in it."""

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""

    def __len__(self) -> int:
        """Return the number of batches in the whole epoch."""

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the epoch, from the loaded position or from the beginning."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch as JSON values, valid for any layout."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the next iteration from a saved position."""


class Batches:
    """The global batches of one epoch, of which each rank loads its part.

    Iterating yields `Batch` objects with the micro-batches of this rank's replica. Unless a sampler
    repeats samples, each sample occurs once: nothing is padded or repeated. The last batch may be
    smaller; `drop_last` omits a smaller one. The random numbers that `dataset[i]` draws from the
    global generators of torch, Python and numpy depend only on (seed, epoch, i).

    Args:
        dataset: The dataset; see `LoaderOptions`.
        batch_size: The number of samples of a global batch, over all ranks.
        microbatches: The number of micro-batches per batch; at least `replicas`.
        replicas: The number of replicas.
        replica: The replica of this rank.
        hosts: The replicas of each host; None if all are on one.
        rank: This rank, for messages.
        epoch: The epoch, from 0.
        agree: A function that exchanges a few bytes with all ranks, so that they can compare
            their data; None for no comparison.
        options: The other fields of `LoaderOptions`.

    Attributes:
        position: The number of batches that were returned, or are skipped.
        start: The batch at which the next iteration begins.
        who: This rank, for messages.
        content: Descriptions of some samples of the first batch; empty before it is loaded.

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
        is_sharded: bool = False,
        epoch: int = 0,
        agree: GatherFn | None = None,
        **options: Any,
    ) -> None:
        self.options = LoaderOptions(dataset, batch_size, **options)
        if epoch < 0:
            raise DatasetError(f"epoch={epoch}: epochs are counted from 0")
        self.epoch = epoch
        self.agree = agree
        self.position = 0
        self.start = 0
        self.content: Sequence[str] = ()
        self._digest = ""  # of the order, hexadecimal; "" before it is drawn
        self._saved_digest = ""  # of the order of a loaded position
        on_hosts = hosts or on_one_host(replicas)
        self._share = ReplicaShare(microbatches, on_hosts, replica, is_sharded)
        self.who = f"rank {rank}" if rank is not None else f"replica {replica}"
        # Of the current iteration.
        self._planned: EpochOrder | None = None  # the order; None for an iterable dataset

    def __len__(self) -> int:
        """Return the number of batches in the whole epoch."""
        return self.options.count_batches()

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the epoch, from the loaded position or from the beginning."""
        start = self.start
        self.start = 0
        self.position = start
        begun = perf_counter() - Waited.seconds
        with closing(self._all_items(start)) as items:
            for item, source in items:
                # Without the comparisons of the epoch and of samples, which wait for other ranks.
                seconds = perf_counter() - Waited.seconds - begun
                batch = self._batch(item, source, seconds)
                if self.position == 0 and isinstance(item, LoadedBatch):
                    self.content = item.descriptions
                self.position += 1
                yield batch
                begun = perf_counter() - Waited.seconds
        if self.position == 0:
            options = self.options
            few = "no samples"
            if options.drop_last:
                few = f"fewer than {options.batch_size} samples"
            raise DatasetError(f"the dataset {options.name} has {few}")

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch as JSON values, valid for any layout.

        `position` counts the batches that were returned; batches that workers have prepared ahead
        are prepared again. `order` is a digest of the order of the epoch.
        """
        settings = self.options.describe(self.epoch)
        return {
            "position": self.position,
            **settings,
            "order": self._digest,
            "content": [*self.content],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the next iteration from a saved position.

        Raises:
            DatasetError: The state belongs to another number of samples, batch size, seed, epoch,
                `shuffle` or `drop_last`. If the order differs, the next iteration raises the error.
        """
        for name, here in self.options.describe(self.epoch).items():
            saved = state.get(name, False)  # older states lack drop_last
            if saved != here:
                raise DatasetError(
                    f"the saved position belongs to {name.replace('_', ' ')} {saved}, "
                    f"but these batches have {here}"
                )
        self.position = int(state["position"])
        self.start = self.position
        self._digest = state.get("order", "")
        self._saved_digest = self._digest
        self.content = state.get("content", ())

    def enter_share(self, share: ReplicaShare, rank: int) -> None:
        """Load the micro-batches of another share from now on; the order does not change."""
        self._share = share
        self.who = f"rank {rank}"

    def _all_items(self, start: int) -> Generator[tuple[LoadedItem, Source], None, None]:
        """Yield the items from batch `start` on, each with the source that loaded it."""
        source = self._open(start)
        items = compare_first(self._items(source, start), self.agree)
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
        if self.options.is_iterable:
            self._compare_epoch(start, None)
            return self._make_source(start, is_compared=True)
        self._planned = self._plan_epoch(start)
        return self._make_source(start, is_compared=True)

    def _make_source(self, start: int, *, is_compared: bool = False) -> Source:
        options = self.options
        share = self._share
        keys = (options.seed, self.epoch)
        collate = options.collate_fn
        if options.is_iterable:
            size = cast(int, options.batch_size)
            checks_collate = is_compared and is_own(collate)
            return IterableSource(
                options.dataset,
                size,
                share,
                keys=keys,
                start=start,
                collate=collate,
                drop_last=options.drop_last,
                checks_collate=checks_collate,
            )
        assert self._planned is not None
        first = start if is_compared else -1
        if collate is None:
            tensors = TensorSource.of(options.dataset, self._planned, share, first)
            if tensors is not None:
                return tensors
        return MapSource(options.dataset, self._planned, share, keys, collate, first)

    @property
    def _pins_memory(self) -> bool:
        return self.options.pin_memory and find_accelerator() is not None

    def _items(self, source: Source, start: int) -> Items:
        """Return the items of the batches from `start` on."""
        if isinstance(source, IterableSource):
            numbers = None
        else:
            numbers = range(start, len(source.epoch))
            if isinstance(source, TensorSource):
                return load_in_process((source[number] for number in numbers), self._pins_memory)
        options = self.options
        seed = key(self.options.seed, self.epoch)
        return load_in_workers(
            source, numbers, options.num_workers, self._pins_memory, options.timeout, seed
        )

    def _load_again(
        self, source: Source, number: int, share: ReplicaShare
    ) -> tuple[Microbatch, ...]:
        """Load batch `number` for another share, in this process."""
        if isinstance(source, IterableSource):
            again = replace(source, share=share, start=number, checks_collate=False)
            items = load_isolated(again, self._pins_memory)
        else:
            other = replace(source, share=share, first=-1)
            load = load_in_process if isinstance(source, TensorSource) else load_isolated
            items = load((other[batch] for batch in (number,)), self._pins_memory)
        with closing(items):
            size, parts = self._require_loaded(next(items), number)
        return tuple(
            Microbatch(index, len(piece), part)
            for (index, piece), part in zip(share.pieces(size), parts, strict=True)
        )

    def _require_loaded(self, item: LoadedItem, number: int) -> tuple[int, list[Any]]:
        """Return the size and the parts of an item; raise the error of a failed item."""
        if isinstance(item, LoadFailure):
            raise item.error(f"{item.message} ({self.who}, batch {number})")
        return item.size, item.parts

    def _plan_epoch(self, start: int) -> EpochOrder:
        """Determine the order of the epoch, and check that it is the same on all ranks."""
        try:
            epoch = self._draw_order(start)
        except BaseException:
            if self.agree is not None:
                # The other ranks wait for this message.
                self.agree(pack_described({}), "beginning")
            raise
        self._compare_epoch(start, epoch)
        return epoch

    def _draw_order(self, start: int) -> EpochOrder:
        """Draw the order of the epoch; DatasetError if it differs from that of a saved position."""
        order = self.options.make_order(self.epoch)
        saved = self._saved_digest
        self._digest = order.digest().hex()
        self._saved_digest = ""
        if saved in ("", self._digest):
            return order
        sampler = self.options.given_sampler
        cause = "the dataset or the version of torch"
        if sampler is not None:
            cause = (
                f"the sampler {type(sampler).__name__}, which must draw from the global generators "
                "of torch, Python or numpy and may depend on nothing else but set_epoch(epoch),"
            )
        raise DatasetError(
            f"the order of epoch {self.epoch} differs from that of the saved position before batch "
            f"{start}: {cause} has changed"
        )

    def _compare_epoch(self, start: int, epoch: EpochOrder | None) -> None:
        if self.agree is None:
            return
        options = self.options
        settings = {
            "number of samples": count_samples_of(options.dataset),
            "batch_size": options.batch_size,
            "drop_last": options.drop_last,
            "number of micro-batches": self._share.microbatches,
            "seed": options.seed,
            "epoch": self.epoch,
            "first batch": start,
            "number of batches": None if epoch is None else len(epoch),
            ORDER: "" if epoch is None else self._digest,
        }
        require_same_epoch(self.agree(pack_described(settings), "beginning"))

    def _batch(self, item: LoadedItem, source: Source, seconds: float) -> Batch:
        size, parts = self._require_loaded(item, self.position)
        share = source.share
        if self._planned is not None:
            indices = self._planned.batch_indices(self.position)
            samples = hash_indices(indices)
        else:  # an iterable dataset: hash the positions in the stream
            indices = None
            first = self.position * cast(int, self.options.batch_size)
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
            identity=BatchIdentity(self.epoch, self.position, self._digest, samples=samples),
            indices=indices,
            share=share,
            load=partial(self._load_again, source, self.position),
        )
