"""The training data of a framework's loop: this rank's micro-batches of each batch.

    DataLoader(dataset, 4, shuffle=True), M = 8      the batch size is that of a micro-batch
    MicrobatchLoader on 2 ranks                      yields one list of 4 micro-batches per step

The number of lists does not depend on the number of ranks, and neither do schedules that a
framework computes from it.

The order of the samples is drawn by Lockstep if the DataLoader has no sampler of the user's own. A
sampler decides the order otherwise; the lists of a batch sampler are the micro-batches. An iterable
dataset is read by all ranks, and split by position.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lockstep.comm.collectives import all_gather_bytes
from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.data.checked_loading import load_checked
from lockstep.data.consistency import GatherFn
from lockstep.data.dataloader import resolve_data
from lockstep.data.loader import Batches
from lockstep.data.microbatch import align_tensors
from lockstep.data.microbatch_sampler import (
    LoadedHere,
    MicrobatchConsumer,
    MicrobatchSampler,
    MicrobatchSource,
    PlannedMicrobatch,
)
from lockstep.foreign_messages import REFUSED_CLASS
from lockstep.kernel.errors import UsageError
from lockstep.kernel.seeds import key
from lockstep.training.script_loop.exact import Exact

__all__ = [
    "MicrobatchLoader",
    "Microbatches",
    "exchange_values",
    "find_gather",
    "find_rank",
    "leaving",
    "rebuild_loader",
]

KNOWN = (RandomSampler, SequentialSampler, DistributedSampler)
"""The samplers whose order is a permutation, or that of the dataset."""

KEPT = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
"""The options of a DataLoader that do not decide which samples it yields."""


def find_rank() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def find_gather() -> GatherFn | None:
    """Return a function that exchanges messages with all ranks; None on one rank."""
    return all_gather_bytes if find_rank()[1] > 1 else None


def exchange_values(gather: GatherFn, values: Any, about: str) -> list[Any]:
    """Return the tensors, numbers, strings, lists, tuples and mappings of all ranks.

    Raises:
        UsageError: Another object is among them.
    """
    buffer = io.BytesIO()
    torch.save(values, buffer)
    messages = gather(buffer.getvalue(), about)
    try:
        return [torch.load(io.BytesIO(message), weights_only=True) for message in messages]
    except pickle.UnpicklingError as error:
        found = REFUSED_CLASS.search(str(error))
        what = found[1] if found else "another object"
        raise UsageError(
            f"{about} other ranks: {what} is not exchanged; return tensors, numbers and strings, "
            "in lists, tuples and dicts"
        ) from None


@contextmanager
def leaving(handle: Exact) -> Iterator[None]:
    """Undo the step of a handle if the body raises, before the framework handles the error."""
    try:
        yield
    except BaseException:
        handle.leave()
        raise


def rebuild_loader(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """Return a DataLoader with the same options and another batch sampler."""
    options: dict[str, Any] = {name: getattr(loader, name) for name in KEPT}
    return DataLoader(loader.dataset, batch_sampler=batch_sampler, **options)


class Microbatches(list[Any]):
    """This rank's micro-batches of a batch.

    Args:
        microbatches: Their data.
        samples: The number of samples of the whole batch.
    """

    def __init__(self, microbatches: Iterable[Any] = (), samples: int = 0) -> None:
        super().__init__(microbatches)
        self.samples = samples


class MicrobatchLoader:
    """This rank's micro-batches of each batch, from the DataLoader of a user.

    Args:
        owner: The class that loads the data, for messages.
        loader: The DataLoader, whose batches have the size of a micro-batch.
        microbatches: The number of micro-batches of a batch.
        seed: The random seed of the order and of the loading of samples.
        known: Samplers other than those of torch whose order is a permutation.
        shuffle: Whether to shuffle a dataset without a sampler of the user's own; None to do what
            the DataLoader does.

    Attributes:
        source: What a handle follows.
        dataset: The dataset.
        share: The micro-batches of this rank.

    Raises:
        UsageError: The data cannot be divided.
        DatasetError: A sampler's order cannot be the same on every rank.
        LayoutError: There are more ranks than micro-batches, or than samples in the last batch.
    """

    def __init__(
        self,
        owner: str,
        loader: DataLoader[Any],
        microbatches: int,
        seed: int,
        known: tuple[type, ...] = (),
        shuffle: bool | None = None,
    ) -> None:
        rank, ranks = find_rank()
        self.share = ReplicaShare(microbatches, on_one_host(ranks), rank)
        self.dataset: Any = loader.dataset
        self._seed = seed
        self._planned: deque[PlannedMicrobatch] = deque()
        self.source: MicrobatchSource
        if isinstance(loader.dataset, IterableDataset):
            self._stream = StreamedBatches(loader, self.share, seed)
            self.source = self._stream
            return
        given: Any = loader.batch_sampler
        batches = getattr(given, "batch_sampler", given)  # without the part of a rank
        if batches is None:
            raise UsageError(
                f"{owner} got a DataLoader with batch_size=None, whose items cannot be divided "
                "among ranks: pass the batch_size of a micro-batch"
            )
        order = _find_order(batches, loader.dataset, (*KNOWN, *known), shuffle)
        size = microbatches * getattr(batches, "batch_size", 1)
        sampler = MicrobatchSampler(loader.dataset, size, share=self.share, seed=seed, **order)
        sampler.attach(self)
        self._loader = rebuild_loader(loader, sampler)
        # torch draws the seed of workers from it instead of the default one.
        self._loader.generator = torch.Generator()
        self._sampler = sampler
        self.source = sampler

    def __len__(self) -> int:
        """Return the number of batches of the epoch; TypeError if it is unknown."""
        return self._sampler.batches if hasattr(self, "_sampler") else len(self._stream)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, unless it is resumed."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self.source.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the handle has the position. Lightning warns of loaders without this."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the result of `state_dict`."""

    def begin_epoch(self) -> None:
        """Discard what an earlier iteration has planned."""
        self._planned.clear()

    def plan(self, microbatch: PlannedMicrobatch) -> None:
        """Expect a micro-batch; the sampler calls this."""
        self._planned.append(microbatch)

    def leave(self) -> None:
        """Do nothing: the next iteration begins with what it plans."""

    @property
    def sampler(self) -> MicrobatchLoader:
        """Where Lightning looks for `set_epoch`."""
        return self

    def __iter__(self) -> Iterator[Microbatches]:
        """Yield the micro-batches of this rank, a list for each batch."""
        if not hasattr(self, "_sampler"):
            yield from self._stream
            return
        self._loader.generator.manual_seed(key(self._seed, self.source.epoch))
        with closing(load_checked(self._loader, find_gather())) as items:
            for item in items:
                planned = self._planned.popleft()
                own = len(self.share.spans(planned.leaves)[self.share.replica])
                batch = [item, *islice(items, own - 1)]
                for _ in batch[1:]:
                    self._planned.popleft()
                # What the framework's hooks draw before the first micro-batch is of no rank.
                LoadedHere.end()
                yield Microbatches(align_tensors(batch), planned.samples)


def _find_order(
    batches: Any, dataset: Any, known: tuple[type, ...], shuffle: bool | None
) -> dict[str, Any]:
    """Return the options of a MicrobatchSampler that decide the order."""
    if type(batches) is not BatchSampler:
        return {"batch_sampler": batches, "shuffle": False, "drop_last": False}
    sampler: Any = batches.sampler
    is_subset = isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(dataset)
    )
    if type(sampler) not in known or is_subset:
        return {"sampler": sampler, "shuffle": False, "drop_last": batches.drop_last}
    if shuffle is None:
        shuffle = getattr(sampler, "shuffle", isinstance(sampler, RandomSampler))
    return {"shuffle": shuffle, "drop_last": batches.drop_last}


class StreamedBatches:
    """The batches of an iterable dataset, which every rank reads, as `Trainer.batches` does.

    Args:
        loader: The DataLoader of the dataset.
        share: The micro-batches of this rank.
        seed: The random seed of the loading of samples.

    Attributes:
        epoch: The epoch of the next iteration.
        start: The first batch of the next iteration.
        settings: The arguments, which ranks compare.
    """

    def __init__(self, loader: DataLoader[Any], share: ReplicaShare, seed: int) -> None:
        options = resolve_data(loader, None, {})
        size = options.pop("batch_size") * share.microbatches
        self._options = {**options, "batch_size": size, "seed": seed}
        self._share = share
        self._consumers: list[MicrobatchConsumer] = []
        self.epoch = 0
        self.start = 0
        self.settings = f"{type(loader.dataset).__name__}, batch_size={size}, seed={seed}"

    def attach(self, consumer: MicrobatchConsumer) -> None:
        """Tell a consumer which micro-batches follow."""
        self._consumers.append(consumer)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, unless it is resumed."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.start = 0

    def __len__(self) -> int:
        """Return the number of batches; TypeError if it is unknown."""
        return len(self._open())

    def __iter__(self) -> Iterator[Microbatches]:
        """Yield the micro-batches of this rank, a list for each batch."""
        batches = self._open()
        epoch = self.epoch
        start = self.start
        self.start = 0
        batches.load_state_dict({**batches.state_dict(), "position": start})
        for consumer in self._consumers:
            consumer.begin_epoch()
        for number, batch in enumerate(batches, start):
            self._share.require_samples(batch.size)  # a framework computes at least one
            for microbatch in batch.microbatches:
                planned = PlannedMicrobatch(
                    microbatch.index, microbatch.size, batch.size, batch.leaves, epoch, number
                )
                for consumer in self._consumers:
                    consumer.plan(planned)
            data = [microbatch.data for microbatch in batch.microbatches]
            yield Microbatches(data, batch.size)

    def _open(self) -> Batches:
        share = self._share
        return Batches(
            **self._options,
            microbatches=share.microbatches,
            replicas=share.replicas,
            replica=share.replica,
            rank=share.replica,
            epoch=self.epoch,
            agree=find_gather(),
        )
