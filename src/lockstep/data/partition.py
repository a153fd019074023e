"""The partition: one dataset as several that share nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch.utils.data import Dataset, Subset

from lockstep.data.order import order, partition_sizes
from lockstep.errors import DatasetError

__all__ = ["partition"]


def partition(
    dataset: Dataset[Any], fractions: Sequence[float], seed: int = 0
) -> list[Subset[Any]]:
    """Cut `dataset` into subsets of the given `fractions`, in an order shuffled by `seed`.

    The subsets are disjoint and together the whole; their sizes are rounded by
    largest remainder, so nothing is lost. The same on every rank.

    Raises DatasetError for a dataset without a length, and for fractions that are
    empty, negative, or do not sum to 1 within 1e-6.
    """
    if not hasattr(dataset, "__len__"):
        raise DatasetError(f"{type(dataset).__name__} has no length, so it cannot be partitioned")
    total = len(dataset)
    bounds = [0]
    for size in partition_sizes(total, fractions):
        bounds.append(bounds[-1] + size)
    shuffled = order(total, seed, 0).tolist()
    return [Subset(dataset, shuffled[lo:hi]) for lo, hi in pairwise(bounds)]
