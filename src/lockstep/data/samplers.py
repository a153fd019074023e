"""Samplers of the user: an order that depends only on the seed and the epoch.

Before an order is drawn, the global generators are seeded, so every rank draws the same order, and
a resumed training draws it again. A sampler with a generator of its own, or whose order depends on
how often it was drawn, is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DistributedSampler

from lockstep.data.epoch_order import EpochOrder
from lockstep.data.generators import is_private_generator
from lockstep.kernel.errors import DatasetError
from lockstep.kernel.seeds import isolated, key, seed_all

__all__ = ["draw_batches", "draw_indices", "sampler_chain", "validate_sampler"]

REPEATED = 1000  # indices or batches that are drawn again

T = TypeVar("T")
R = TypeVar("R")


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
        DatasetError: The sampler yields nothing, something other than integers, or another order
            when it is drawn again.
    """
    indices = _draw(sampler, _to_integer, seed, epoch)
    if not indices:
        raise DatasetError(
            f"the sampler {type(sampler).__name__} yielded no sample; a generator can be read only "
            "once: pass a Sampler or a list"
        )
    return EpochOrder.from_indices(
        torch.tensor(indices, dtype=torch.int64), batch_size, drop_last
    ).with_repeats()


def draw_batches(batch_sampler: Iterable[Sequence[int]], seed: int, epoch: int) -> EpochOrder:
    """Draw the batches of an epoch from a batch sampler, with seeded global generators.

    Raises:
        DatasetError: The sampler yields nothing, an empty batch, something other than integers, or
            another order when it is drawn again.
    """
    batches = _draw(batch_sampler, _to_integers, seed, epoch)
    if not batches:
        raise DatasetError(
            f"the batch sampler {type(batch_sampler).__name__} yielded no batch; a generator can "
            "be read only once: pass a Sampler or a list"
        )
    return EpochOrder.from_batches(batches)


def _draw(sampler: Iterable[T], convert: Callable[[T], R], seed: int, epoch: int) -> list[R]:
    """Return what a sampler yields in an epoch, and draw the beginning again."""
    for part in sampler_chain(sampler):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    drawn = list[list[R]]()
    for length in (None, REPEATED):
        with isolated(everything=True):
            seed_all(key(seed, epoch))
            drawn.append([convert(value) for value in islice(sampler, length)])
    first, again = drawn
    if again and again != first[:REPEATED]:  # an iterator yields nothing again
        raise DatasetError(
            f"the sampler {type(sampler).__name__} yields another order when epoch {epoch} is "
            "drawn again, so a resumed training would differ: draw from the global generators of "
            "torch, Python or numpy, and count epochs in set_epoch(epoch), which is called before"
        )
    return first


def _to_integers(batch: Any) -> list[int]:
    if not hasattr(batch, "__iter__"):
        raise DatasetError(
            f"the batch sampler yielded {batch!r}, but a batch must be a list of indices: pass "
            "single indices as sampler="
        )
    return [*map(_to_integer, batch)]


def _to_integer(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:
        raise DatasetError(
            f"the sampler yielded {index!r}, but indices of samples must be integers"
        ) from None
