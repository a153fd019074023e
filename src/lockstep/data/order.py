"""The order: which samples make which global batch of an epoch.

    samples   0 1 2 3 4 5 6         order(7, seed, epoch)  ->  3 0 6 2 5 1 4
    batches of 3                                               3 0 6 | 2 5 1 | 4

The order depends on (samples, seed, epoch) and on nothing else; the layout only
decides who loads which piece of it. Pure: plain values in, plain values out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from lockstep.errors import DatasetError
from lockstep.randomness import key

__all__ = ["Epoch", "order", "partition_sizes"]


def partition_sizes(total: int, fractions: Sequence[float]) -> list[int]:
    """Cut `total` things by `fractions`, by largest remainder; the sizes add up to `total`.

    Computed in exact fractions, so that 0.1 means one tenth. Of equal remainders
    the first comes first. Raises DatasetError where the fractions are empty, not
    finite, negative, or do not sum to 1 within 1e-6.
    """
    if not fractions:
        raise DatasetError("cannot partition a dataset by no fractions; give at least one")
    for fraction in fractions:
        if not math.isfinite(fraction) or fraction < 0:
            raise DatasetError(f"a dataset cannot be partitioned by {fraction}; give shares of 1")
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


def order(samples: int, seed: int, epoch: int, shuffle: bool = True) -> torch.Tensor:
    """Return the order of an epoch: a permutation of `range(samples)`, int64.

    It is `torch.randperm` of a generator seeded with `key(seed, epoch)`; without
    `shuffle` it is ascending.
    """
    if not shuffle:
        return torch.arange(samples)
    generator = torch.Generator().manual_seed(key(seed, epoch))
    return torch.randperm(samples, generator=generator)


@dataclass(frozen=True)
class Epoch:
    """The global batches of one epoch: `indices[starts[b]:starts[b + 1]]` is batch b.

    `repeats` counts, where some sample is drawn more than once, how often it was
    drawn before; each of its draws has random numbers of its own.
    """

    indices: torch.Tensor
    starts: Sequence[int]
    repeats: torch.Tensor | None = None

    @classmethod
    def uniform(cls, indices: torch.Tensor, batch_size: int) -> Epoch:
        """Cut an order into batches of `batch_size`, the last one short where it must be."""
        return cls(indices, range(0, len(indices), batch_size))

    @classmethod
    def grouped(cls, batches: Iterable[Sequence[int]]) -> Epoch:
        """Take whole batches as somebody else made them."""
        flat: list[int] = []
        starts: list[int] = []
        for batch in batches:
            if len(batch) == 0:
                raise DatasetError(f"the batch sampler's batch {len(starts)} holds no sample")
            starts.append(len(flat))
            flat.extend(batch)
        return cls(torch.tensor(flat, dtype=torch.int64), starts).counted()

    def counted(self) -> Epoch:
        """Return this epoch with its repeated draws counted."""
        return Epoch(self.indices, self.starts, _repeats(self.indices))

    def __len__(self) -> int:
        """Return the number of global batches."""
        return len(self.starts)

    def span(self, batch: int) -> range:
        """Return the positions of `batch` in the order."""
        last = batch + 1 == len(self.starts)
        return range(self.starts[batch], len(self.indices) if last else self.starts[batch + 1])

    def digest(self) -> bytes:
        """Return 16 bytes that two ranks share exactly when their batches are the same."""
        starts = torch.tensor(self.starts, dtype=torch.int64)
        result = hashlib.blake2b(starts.numpy().tobytes(), digest_size=16)
        result.update(self.indices.contiguous().numpy().data)
        return result.digest()


def _repeats(indices: torch.Tensor) -> torch.Tensor | None:
    """Count for each position how often its sample was drawn before; None where none was."""
    if len(indices.unique()) == len(indices):
        return None
    seen: dict[int, int] = {}
    repeats = torch.empty_like(indices)
    for position, index in enumerate(indices.tolist()):
        repeats[position] = seen.get(index, 0)
        seen[index] = seen.get(index, 0) + 1
    return repeats
