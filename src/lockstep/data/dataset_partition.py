"""The partition of a dataset into disjoint subsets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, SupportsFloat

from torch.utils.data import DataLoader, Dataset, Subset

from lockstep.call_checks import check_call
from lockstep.data.epoch_order import epoch_permutation
from lockstep.kernel.errors import DatasetError

__all__ = ["partition", "partition_sizes"]


@check_call("ls.partition")
def partition(
    dataset: Dataset[Any], fractions: Sequence[float], seed: int = 0
) -> list[Subset[Any]]:
    """Split a dataset into disjoint subsets, the same on every rank.

    Samples are assigned at random, each to exactly one subset. Sizes are rounded by the
    largest-remainder method.

    Args:
        dataset: A map-style dataset.
        fractions: The share of each subset; the shares must sum to 1.
        seed: The random seed of the assignment, 0 by default.

    Raises:
        DatasetError: The dataset is a DataLoader or has no length, or the fractions are empty,
            negative, or do not sum to 1 within 1e-6.
    """
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DatasetError(f"a {name} has batches, so it cannot be partitioned: pass its dataset")
    if not hasattr(dataset, "__len__"):
        raise DatasetError(f"{name} has no length, so it cannot be partitioned")
    total = len(dataset)
    bounds = [0]
    for size in partition_sizes(total, fractions):
        bounds.append(bounds[-1] + size)
    shuffled = epoch_permutation(total, seed, 0).tolist()
    return [Subset(dataset, shuffled[lo:hi]) for lo, hi in pairwise(bounds)]


def partition_sizes(total: int, fractions: Sequence[float]) -> list[int]:
    """Return the sizes of the parts of `total` items, by the largest-remainder method.

    Fractions are read as exact decimals, so 0.1 is one tenth. On ties, the first part is larger.

    Raises:
        DatasetError: The fractions are empty, not finite, negative, or do not sum to 1 within
            1e-6.
    """
    if not len(fractions):
        raise DatasetError("cannot partition a dataset without fractions; pass at least one")
    for fraction in fractions:
        if not isinstance(fraction, SupportsFloat) or not 0 <= fraction < math.inf:
            raise DatasetError(
                f"a dataset cannot be partitioned by {fraction}; pass fractions between 0 and 1"
            )
    shares = [Fraction(str(float(fraction))) for fraction in fractions]
    whole = sum(shares, Fraction(0))
    if abs(whole - 1) > Fraction(1, 1_000_000):
        raise DatasetError(f"the fractions {list(fractions)} sum to {float(whole):g}, not to 1")
    quotas: list[Fraction] = [total * share / whole for share in shares]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda part: Fraction(sizes[part]) - quotas[part])
    for part in by_remainder[: total - sum(sizes)]:
        sizes[part] += 1
    return sizes
