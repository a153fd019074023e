"""Evaluation in a framework's loop: each batch of a DataLoader is computed by one rank.

    batches of the DataLoader    0 1 2 3 4      the same samples on any number of ranks, none twice
    rank 0 of 2, contiguous      0 1 2 . .      "." is ELSEWHERE
    rank 1                       . . . 3 4
    ranks that take turns        0 . 2 . 4  and  . 1 . 3 .

The generators are seeded for each batch by its number, and between batches they are as before the
first one, on every rank: what hooks draw there, and after the last batch, is equal on all ranks.
What the ranks compute is joined in the order of the batches, or added exactly
(`lockstep.kernel.exact_sum`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.data.checked_loading import load_seeded
from lockstep.data.consistency import (
    ORDER,
    pack_described,
    require_same_epoch,
    require_same_samples,
)
from lockstep.data.microbatch import align_tensors
from lockstep.data.microbatch_sampler import LoadedHere, SeededIndices
from lockstep.data.repeatability import describe_sample, select_positions
from lockstep.data.samplers import draw_batches, validate_sampler
from lockstep.integrations.microbatch_loader import find_gather, find_rank, rebuild_loader
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import DisagreementError, UsageError
from lockstep.kernel.seeds import key, remembered, seed_all
from lockstep.kernel.splitting import split_evenly
from lockstep.model.collective_calls import wrap_collective_calls

__all__ = ["ELSEWHERE", "EvaluationLoader", "evaluating"]

ELSEWHERE = object()
"""The stand-in for the data of a batch that another rank computes."""


@contextmanager
def evaluating() -> Iterator[None]:
    """Evaluate in the body, with the generators from before the training has loaded its batch."""
    if find_gather() is not None:
        wrap_collective_calls()  # so that those of a batch can be refused
    LoadedHere.end()
    try:
        yield
    finally:
        LoadedHere.restore = None  # of a batch of the evaluation


class Turn(NamedTuple):
    """The batch of this rank in a round.

    Attributes:
        number: Its number.
        data: Its data.
        is_repeated: Whether another rank computes it, and this one only keeps it company.
    """

    number: int
    data: Any
    is_repeated: bool


class EvaluationLoader:
    """The batches of a DataLoader in their order, of which this rank loads some.

    Iterate over it within `evaluating`.

    Args:
        owner: The class that evaluates, for messages.
        loader: The DataLoader.
        seed: The random seed of the order, of loading samples and of the model.
        device: The device whose generator is seeded.
        is_contiguous: Whether the batches of a rank follow each other, where their number is known;
            otherwise ranks take turns.
        is_divided: Whether a rank computes some of the batches; otherwise, it computes all.

    Attributes:
        dataset: The dataset.
        batch_size: The number of samples of a batch; None if a batch sampler decides.
        epoch: The epoch of the next iteration.
        limit: The largest number of batches of an iteration.
        lists: The samples of each batch of the last iteration, of a map-style dataset.

    Raises:
        UsageError: The DataLoader yields samples instead of batches.
        DatasetError: The order of a sampler cannot be the same on every rank.
    """

    def __init__(
        self,
        owner: str,
        loader: DataLoader[Any],
        seed: int,
        device: torch.device,
        *,
        is_contiguous: bool = False,
        is_divided: bool = True,
    ) -> None:
        self._loader = loader
        self._seed = seed
        self._device = device
        self._place = find_rank() if is_divided else (0, 1)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._takes_turns = self._is_stream or not is_contiguous
        self.dataset: Any = loader.dataset
        self.batch_size = loader.batch_size
        self.epoch = 0
        self._restore: Callable[[], None] = lambda: None  # the generators as before the batches
        self.limit: float = math.inf
        self.lists: list[list[int]] = []
        given: Any = loader.batch_sampler
        self._batches = getattr(given, "batch_sampler", given)  # without the part of a rank
        if not self._is_stream:
            if self._batches is None:
                raise UsageError(
                    f"{owner} got a DataLoader with batch_size=None to evaluate, whose items "
                    "cannot be divided among ranks: pass a batch_size"
                )
            validate_sampler(self._batches)

    def __len__(self) -> int:
        """Return the number of batches on all ranks; TypeError if it is unknown."""
        return len(self._loader if self._is_stream else self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch

    @property
    def sampler(self) -> EvaluationLoader:
        """Where Lightning looks for `set_epoch`."""
        return self

    @contextmanager
    def computing(self, number: int, buffers: Buffers) -> Iterator[None]:
        """Compute a batch in the body: with its random numbers, without a trace in buffers."""
        seed_all(key(self._seed, -1 - number), self._device)
        try:
            with buffers.preserve():
                yield
        finally:
            self._restore()

    def join(self, results: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the results of the batches of all ranks in the order of the batches."""
        total = sum(map(len, results))
        if self._takes_turns:
            return [
                results[number % len(results)][number // len(results)] for number in range(total)
            ]
        return [result for own in results for result in own]

    def __iter__(self) -> Iterator[Any]:
        """Yield the data of each batch, or ELSEWHERE."""
        self._restore = remembered(self._device, everything=True)
        for data in self._read() if self._is_stream else self._load():
            self._restore()  # this rank may have loaded a batch, another one not
            yield data
        self._restore()

    def rounds(self) -> Iterator[Turn]:
        """Yield a batch of this rank for as many batches as there are ranks.

        A rank without a batch in the last round repeats one.
        """
        ranks = self._place[1]
        batches = iter(self)
        last = ELSEWHERE
        begin = 0
        while turn := [*islice(batches, ranks)]:
            for number, data in enumerate(turn, begin):
                if data is not ELSEWHERE:
                    yield Turn(number, data, is_repeated=False)
                    last = data
                    break
            else:
                yield Turn(begin, self._load_first() if last is ELSEWHERE else last, True)
            begin += ranks

    def _load_first(self) -> Any:
        """Return the first batch, which another rank computes."""
        if self._is_stream:
            return next(iter(self._loader))
        return next(iter(rebuild_loader(self._loader, self.lists[:1])))

    def _load(self) -> Iterator[Any]:
        """Yield the batches of a map-style dataset."""
        order = draw_batches(self._batches, self._seed, self.epoch)
        gather = find_gather()
        if gather is not None:
            settings = {"number of samples": len(self.dataset), ORDER: order.digest().hex()}
            require_same_epoch(gather(pack_described(settings), "beginning an evaluation"))
        self.lists = [order.batch_indices(number).tolist() for number in range(len(order))]
        total = int(min(len(order), self.limit))
        own = self._find_own(total)
        checked = select_positions(order.span(0))
        seeds = order.sample_seeds(self._seed, self.epoch, checked)
        checks = tuple(zip(order.indices[checked].tolist(), seeds, strict=True))
        lists = list[SeededIndices]()
        for number in own:
            seeds = order.sample_seeds(self._seed, self.epoch, order.span(number))
            collate_seed = key(self._seed, self.epoch, -1 - number, 0)
            lists.append(SeededIndices(self.lists[number], seeds, collate_seed, checks))
            checks = ()
        items = load_seeded(rebuild_loader(self._loader, lists), gather)
        # Now, on every rank: it compares samples of all ranks, also if it loads none here.
        first = next(items, ELSEWHERE)
        for number in range(total):
            if number not in own:
                yield ELSEWHERE
            elif number == own[0]:
                yield align_tensors(first)
            else:
                yield align_tensors(next(items))

    def _find_own(self, total: int) -> Sequence[int]:
        rank, ranks = self._place
        return range(rank, total, ranks) if self._takes_turns else split_evenly(total, ranks)[rank]

    def _read(self) -> Iterator[Any]:
        """Yield the batches of an iterable dataset, which every rank reads."""
        rank, ranks = self._place
        gather = find_gather()
        seed_all(key(self._seed, self.epoch))  # of workers, and of what `iter` draws
        stream = iter(self._loader)
        number = 0
        while True:
            seed_all(key(self._seed, self.epoch, -1 - number, 0))
            data = next(stream, ELSEWHERE)
            if number == 0 and gather is not None:
                descriptions = () if data is ELSEWHERE else (describe_sample(0, data),)
                require_same_samples(gather(pack_described(descriptions), "comparing samples of"))
            if data is ELSEWHERE:
                break
            yield align_tensors(data) if number % ranks == rank else ELSEWHERE
            number += 1
        if gather is not None:
            counts = [int(count) for count in gather(b"%d" % number, "ending an evaluation")]
            if len({*counts}) > 1:
                raise DisagreementError(
                    f"the iterable dataset {type(self.dataset).__name__} has {counts} batches on "
                    "the ranks: every rank must read the same stream, which is divided afterwards"
                )
