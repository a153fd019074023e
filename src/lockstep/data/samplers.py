"""Samplers of the user: an order that depends only on the seed and the epoch.

Before an order is drawn, the global generators are seeded, so every rank draws the same order, and
a resumed training draws it again. A sampler with a generator of its own is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from lockstep.data.epoch_order import EpochOrder
from lockstep.data.generators import is_private_generator
from lockstep.kernel.errors import DatasetError
from lockstep.kernel.seeds import isolated, key, seed_all

__all__ = ["draw_batches", "draw_indices", "sampler_chain", "validate_sampler"]


def sampler_chain(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers that it wraps, the outermost first."""
    chain: list[Any] = []
    while sampler is not None and not any(sampler is known for known in chain):
        chain.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
    return chain


def validate_sampler(sampler: Any) -> None:
    """Check that the order of a sampler can be the same on every rank and after a resume.

    Raises:
        DatasetError: It is a DistributedSampler, which yields only a part of the dataset, or has a
            generator of its own.
    """
    for part in sampler_chain(sampler):
        if isinstance(part, DistributedSampler) and part.num_replicas > 1:
            raise DatasetError(
                "a DistributedSampler yields a different part on each rank, but every batch is "
                "already split over the ranks; pass a sampler of the whole dataset, or none"
            )
        for name, value in getattr(part, "__dict__", {}).items():
            if is_private_generator(value):
                raise DatasetError(
                    f"the sampler {type(part).__name__} has a random generator of its own "
                    f"({name}), so its order depends on all earlier draws: leave the generator "
                    "out; the order is drawn from the global generators of torch, Python and "
                    "numpy, which are seeded with the seed and the epoch"
                )


def draw_indices(
    sampler: Iterable[int], batch_size: int, seed: int, epoch: int, drop_last: bool = False
) -> EpochOrder:
    """Draw the order of an epoch from a sampler, with seeded global generators.

    Raises:
        DatasetError: The sampler yields nothing, or something other than integers.
    """
    _set_epoch(sampler, epoch)
    with isolated(everything=True):
        seed_all(key(seed, epoch))
        indices = _to_integers(sampler)
    if not indices:
        raise DatasetError(f"the sampler {type(sampler).__name__} yielded no sample")
    return EpochOrder.from_indices(
        torch.tensor(indices, dtype=torch.int64), batch_size, drop_last
    ).with_repeats()


def draw_batches(batch_sampler: Iterable[Sequence[int]], seed: int, epoch: int) -> EpochOrder:
    """Draw the batches of an epoch from a batch sampler, with seeded global generators.

    Raises:
        DatasetError: The sampler yields nothing, an empty batch, or something other than integers.
    """
    _set_epoch(batch_sampler, epoch)
    with isolated(everything=True):
        seed_all(key(seed, epoch))
        batches = [_to_integers(batch) for batch in batch_sampler]
    if not batches:
        raise DatasetError(f"the batch sampler {type(batch_sampler).__name__} yielded no batch")
    return EpochOrder.from_batches(batches)


def _set_epoch(sampler: Any, epoch: int) -> None:
    for part in sampler_chain(sampler):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _to_integers(indices: Iterable[Any]) -> list[int]:
    result = []
    for index in indices:
        try:
            result.append(operator.index(index))
        except TypeError:
            raise DatasetError(
                f"the sampler yielded {index!r}, but indices of samples must be integers"
            ) from None
    return result
