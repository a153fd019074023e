"""The loader: an epoch's global batches, of which each rank loads its own micro-batches.

    order      3 0 6 2 5 1 4 ...            the same on every rank        order.py
    batches    3 0 6 2 | 5 1 4 ...          of the global batch size
    rank 1     . . 6 2 | . . 4 ...          loaded and collated here      samples.py, stream.py

What a batch holds never depends on the layout, nor on the number of workers.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset

from lockstep.data.agreement import (
    UNKNOWN,
    Description,
    check,
    check_samples,
    packed_samples,
)
from lockstep.data.draws import Draws, restore_sampler, state_of_sampler
from lockstep.data.identity import Identity
from lockstep.data.microbatch import Batch, Microbatch, leaves
from lockstep.data.order import Epoch, order
from lockstep.data.samples import Collate, Failure, Item, Loaded, Samples, Share, Tensors
from lockstep.data.sampling import check_dataset, check_sampler, grouped, sampled
from lockstep.data.stream import Stream
from lockstep.data.workers import Items, in_process, in_workers, seeded_in_process
from lockstep.errors import DatasetError, LayoutError
from lockstep.randomness import key

__all__ = ["Agree", "Batches"]

Agree = Callable[[bytes, str], list[bytes]]
"""Exchanges a message with all ranks, given what it is about; returns theirs in rank order."""


class Batches:
    """The global batches of one epoch, as one rank sees them.

    Iterating gives a `Batch` with this replica's micro-batches. Each sample comes
    once; the last batch may be short; nothing is padded, dropped or repeated.
    What `dataset[i]` draws from torch's, Python's and numpy's generators depends
    only on (seed, epoch, i).

    dataset         map-style, or iterable (cut by position; all ranks must see one stream)
    batch_size      samples in a global batch, over all ranks
    microbatches    M, into which each batch is cut; at least `replicas`
    replica, rank   who this is; `rank` is for messages only
    sampler         gives the order instead: indices of the whole dataset, the same on all ranks
    batch_sampler   gives whole global batches instead; then there is no `batch_size`
    num_workers     processes that load and collate; tensors in memory need none and use none
    collate_fn      makes one micro-batch of a list of samples (torch's default otherwise)
    pin_memory      copy to pinned memory, where there is a GPU
    timeout         seconds that the workers may take for one batch
    agree           exchanges a few bytes with all ranks, so that they can compare their data
    draws           remembers the states of samplers from epoch to epoch

    Raises DatasetError or LayoutError for what cannot work; while iterating
    SampleError where the dataset raises or a worker dies, DatasetError where a sample
    that is loaded twice differs from itself, and DisagreementError where ranks differ in
    their data or settings.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        microbatches: int = 8,
        replicas: int = 1,
        replica: int = 0,
        rank: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        timeout: float = 600.0,
        agree: Agree | None = None,
        draws: Draws | None = None,
    ) -> None:
        check_dataset(dataset)
        self.dataset, self.batch_size = dataset, batch_size
        self.seed, self.epoch, self.shuffle = seed, epoch, shuffle
        self.sampler, self.batch_sampler = sampler, batch_sampler
        self.num_workers, self.collate_fn, self.timeout = num_workers, collate_fn, timeout
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.agree = agree
        self.position = 0
        self._start = 0
        self._order = ""
        self._comparing = 0.0  # seconds for which the ranks compared the batch to come
        self._draws = draws or Draws()
        self._drawn_from: dict[str, Any] | None = None  # the sampler's state before it drew
        self._saved: dict[str, Any] | None = None
        self._share = _share(microbatches, replicas, replica)
        self._who = f"rank {rank}" if rank is not None else f"replica {replica}"
        self._name = type(dataset).__name__
        self._iterable = _is_iterable(dataset)
        self._check()

    def __len__(self) -> int:
        """Return the number of batches in the whole epoch."""
        if self.batch_sampler is not None:
            return len(cast("Sequence[Any]", self.batch_sampler))
        samples = len(cast("Sequence[Any]", self.dataset if self.sampler is None else self.sampler))
        return -(-samples // cast(int, self.batch_size))

    def __iter__(self) -> Iterator[Batch]:
        """Go through the epoch, from where the loaded state left it, else from its beginning."""
        start, self._start = self._start, 0
        self.position = start
        begun = perf_counter()
        with closing(self._compared(self._items(start))) as items:
            for item in items:
                batch = self._batch(item, perf_counter() - begun - self._comparing)
                self.position += 1
                yield batch
                begun = perf_counter()
        if self.position == 0:
            raise DatasetError(f"the dataset {self._name} gave no sample")

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values that say where in which epoch this is, for any layout.

        `position` counts the batches that were handed out; those that workers
        prepared ahead are prepared again. `order` is a digest of the epoch's order,
        `sampler` the state of the sampler's own generators before it drew the order.
        """
        given = self._given()
        drawn_from = self._drawn_from
        if drawn_from is None:
            drawn_from = {} if given is None else state_of_sampler(given)
        return {
            "position": self.position,
            **self._identity(),
            "order": self._order,
            "sampler": drawn_from,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on after the batches that were handed out.

        Raises DatasetError where the state is of another dataset, batch size, seed
        or epoch; the next iteration raises it where the order is another one.
        """
        for name, here in self._identity().items():
            if state[name] != here:
                raise DatasetError(
                    f"the saved position belongs to {name.replace('_', ' ')} {state[name]}, "
                    f"but these batches have {here}"
                )
        self.position = self._start = int(state["position"])
        self._saved = dict(state)
        self._order, self._drawn_from = state.get("order", ""), state.get("sampler", {})

    def _identity(self) -> dict[str, int | bool | None]:
        return {
            "samples": _length(self.dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "epoch": self.epoch,
            "shuffle": self.shuffle,
        }

    def _check(self) -> None:
        if self.batch_sampler is None and (self.batch_size is None or self.batch_size < 1):
            raise DatasetError(f"the global batch size is {self.batch_size}; it must be at least 1")
        if self.batch_sampler is not None and not (
            self.batch_size is None and self.sampler is None
        ):
            raise DatasetError("a batch_sampler gives whole batches: leave batch_size and sampler")
        given = self._given()
        if self._iterable and given is not None:
            raise DatasetError(f"{self._name} is iterable: its order is its own, give no sampler")
        if not self._iterable and given is None and _length(self.dataset) == 0:
            raise DatasetError(f"the dataset {self._name} is empty")
        check_sampler(given)
        if self.num_workers < 0 or self.timeout <= 0:
            raise DatasetError("num_workers must not be negative, and timeout must be above 0 s")
        if self.num_workers > 0 and multiprocessing.current_process().daemon:
            raise DatasetError(
                "a daemon process may not start loader workers; use num_workers=0, "
                "or start the ranks with daemon=False"
            )

    def _given(self) -> Any:
        """Return the sampler or batch sampler that was given, or None."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    def _items(self, start: int) -> Items:
        """Give (size, micro-batches) of each batch from `start` on."""
        if self._iterable:
            self._agreed(start, None)
            return self._prepared(self._stream(start), None)
        epoch = self._planned(start)
        numbers = range(start, len(epoch))
        tensors = None
        if self.collate_fn is None:
            tensors = Tensors.of(self.dataset, epoch, self._share, start)
        if tensors is not None:
            return in_process((tensors[number] for number in numbers), self.pin_memory)
        keys = (self.seed, self.epoch)
        samples = Samples(self.dataset, epoch, self._share, keys, self.collate_fn, start)
        return self._prepared(samples, numbers)

    def _compared(self, items: Items) -> Items:
        """Let all ranks compare a few samples before the first item is handed out."""
        with closing(items):
            try:
                item = next(items, None)
            except Exception:
                self._exchange_samples(())  # the others must not wait for this rank
                raise
            begun = perf_counter()
            check_samples(self._exchange_samples(item.probed if isinstance(item, Loaded) else ()))
            self._comparing = perf_counter() - begun
            if item is not None:
                yield item
                self._comparing = 0.0
                yield from items

    def _exchange_samples(self, probed: Sequence[str]) -> list[bytes]:
        message = packed_samples(probed)
        return [message] if self.agree is None else self.agree(message, "comparing samples of")

    def _stream(self, start: int) -> Stream:
        keys = (self.seed, self.epoch)
        size = cast(int, self.batch_size)
        return Stream(self.dataset, size, self._share, keys, start, self.collate_fn)

    def _prepared(self, source: Samples | Stream, numbers: range | None) -> Items:
        if self.num_workers > 0:
            seed = key(self.seed, self.epoch)
            workers, pin = self.num_workers, self.pin_memory
            return in_workers(source, numbers, workers, pin, self.timeout, seed)
        if isinstance(source, Stream):
            return seeded_in_process(source, self.pin_memory)
        return seeded_in_process((source[number] for number in numbers or ()), self.pin_memory)

    def _planned(self, start: int) -> Epoch:
        """Make the epoch's order, and be sure that all ranks made the same."""
        try:
            epoch = self._ordered() if self._given() is None else self._drawn()
            self._order = epoch.digest().hex()
            self._require_saved_order(start)
        except BaseException:
            if self.agree is not None:
                # the others must not wait for this rank
                self.agree(Description().packed(), "beginning")
            raise
        self._agreed(start, epoch)
        return epoch

    def _drawn(self) -> Epoch:
        """Let the sampler draw the order, from the state that it was saved in."""
        sampler = self._given()
        if self._saved is not None:
            restore_sampler(sampler, self._saved.get("sampler", {}))
        else:
            self._draws.resume(sampler, self.epoch)
        self._drawn_from = state_of_sampler(sampler)
        epoch = self._ordered()
        self._draws.record(self.epoch, self._drawn_from, state_of_sampler(sampler))
        return epoch

    def _require_saved_order(self, start: int) -> None:
        """Raise DatasetError unless the order is the one that the position was saved in."""
        saved, self._saved = self._saved, None
        if saved is None or saved.get("order", "") in ("", self._order):
            return
        sampler = self._given()
        cause = (
            "the dataset or torch's version has changed"
            if sampler is None
            else f"the sampler {type(sampler).__name__} has changed, or keeps state that could not "
            "be restored: let it draw from torch's, Python's or numpy's global generators, which "
            "are seeded for each epoch, or give it state_dict() and load_state_dict()"
        )
        raise DatasetError(
            f"the order of epoch {self.epoch} is not the one in which batch {start} was to come "
            f"next when the position was saved; {cause}"
        )

    def _ordered(self) -> Epoch:
        if self.batch_sampler is not None:
            return grouped(self.batch_sampler, self.seed, self.epoch)
        size = cast(int, self.batch_size)
        if self.sampler is not None:
            return sampled(self.sampler, size, self.seed, self.epoch)
        return Epoch.uniform(order(len(self.dataset), self.seed, self.epoch, self.shuffle), size)

    def _agreed(self, start: int, epoch: Epoch | None) -> None:
        if self.agree is None:
            return
        samples = _length(self.dataset)
        description = Description(
            ready=1,
            samples=UNKNOWN if samples is None else samples,
            batch_size=UNKNOWN if self.batch_size is None else self.batch_size,
            microbatches=self._share.microbatches,
            seed=self.seed,
            epoch=self.epoch,
            position=start,
            batches=UNKNOWN if epoch is None else len(epoch),
            order=bytes.fromhex(self._order) if epoch is not None else bytes(16),
        )
        check(self.agree(description.packed(), "beginning"))

    def _batch(self, item: Item, seconds: float) -> Batch:
        if isinstance(item, Failure):
            raise item.error(f"{item.sentence} ({self._who}, batch {self.position})")
        size, parts, _ = item
        pieces = self._share.pieces(size)
        return Batch(
            size=size,
            leaves=leaves(size, self._share.microbatches),
            microbatches=tuple(
                Microbatch(index, len(piece), part)
                for (index, piece), part in zip(pieces, parts, strict=True)
            ),
            epoch=self.epoch,
            seconds=seconds,
            identity=Identity(self.epoch, self.position, self._order),
        )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _is_iterable(dataset: Any) -> bool:
    """Tell whether `dataset` is read in its own order; DatasetError where it cannot be read."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__"):
        if _length(dataset) is None:
            raise DatasetError(f"the dataset {name} has no length; define __len__")
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise DatasetError(f"{name} is no dataset: it can be neither indexed nor iterated")


def _share(microbatches: int, replicas: int, replica: int) -> Share:
    if not 0 <= replica < replicas:
        raise LayoutError(f"replica {replica} of {replicas} does not exist")
    if replicas > microbatches:
        raise LayoutError(
            f"{replicas} replicas cannot share {microbatches} micro-batches; "
            f"use at least {replicas} micro-batches, or fewer replicas"
        )
    return Share(microbatches, replicas, replica)
