"""The sampler: an order that the user gives, drawn alike on every rank."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.data.order import Epoch
from lockstep.errors import DatasetError
from lockstep.randomness import isolated, key, seed_all

__all__ = ["check_dataset", "check_sampler", "grouped", "nested", "sampled"]


def nested(sampler: Any) -> list[Any]:
    """Return a sampler and those that it draws from, the outermost first."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is each for each in found):
        found.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
    return found


def check_sampler(sampler: Any) -> None:
    """Raise DatasetError for a sampler that gives each rank a part only."""
    if any(
        isinstance(each, DistributedSampler) and each.num_replicas > 1 for each in nested(sampler)
    ):
        raise DatasetError(
            "a DistributedSampler gives each rank a part, but every batch is cut over the ranks "
            "here already; give the sampler of the whole dataset, or none"
        )


def check_dataset(dataset: Any) -> None:
    """Raise DatasetError for a DataLoader, whose batches could not be cut over the ranks."""
    if not isinstance(dataset, DataLoader):
        return
    part = any(isinstance(each, DistributedSampler) for each in nested(dataset))
    raise DatasetError(
        f"{type(dataset).__name__} is not a dataset: give its dataset, with batch_size counting "
        "the samples of all ranks, and its sampler, num_workers and collate_fn as options"
        + part
        * "; leave out its DistributedSampler, since every batch is cut over the ranks here"
    )


def sampled(sampler: Iterable[int], batch_size: int, seed: int, epoch: int) -> Epoch:
    """Return the epoch in the sampler's order; drawn with key(seed, epoch).

    Raises DatasetError where it gives nothing, or something else than whole numbers.
    """
    _set_epoch(sampler, epoch)
    with isolated(everything=True):
        seed_all(key(seed, epoch))
        indices = _whole_numbers(sampler)
    if not indices:
        raise DatasetError(f"the sampler {type(sampler).__name__} gave no sample")
    return Epoch.uniform(torch.tensor(indices, dtype=torch.int64), batch_size).counted()


def grouped(batch_sampler: Iterable[Sequence[int]], seed: int, epoch: int) -> Epoch:
    """Return the epoch in the batches of `batch_sampler`; drawn with key(seed, epoch).

    Raises DatasetError where it gives nothing, an empty batch, or something else
    than whole numbers.
    """
    _set_epoch(batch_sampler, epoch)
    with isolated(everything=True):
        seed_all(key(seed, epoch))
        batches = [_whole_numbers(batch) for batch in batch_sampler]
    if not batches:
        raise DatasetError(f"the batch sampler {type(batch_sampler).__name__} gave no batch")
    return Epoch.grouped(batches)


def _set_epoch(sampler: Any, epoch: int) -> None:
    for each in nested(sampler):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)


def _whole_numbers(indices: Iterable[Any]) -> list[int]:
    result = []
    for index in indices:
        try:
            result.append(operator.index(index))
        except TypeError:
            raise DatasetError(
                f"the sampler gave {index!r} where a sample's index, a whole number, belongs"
            ) from None
    return result
