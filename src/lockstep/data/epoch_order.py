"""The order of an epoch: the samples of each global batch.

    samples   0 1 2 3 4 5 6     epoch_permutation(7, seed, epoch)  ->  3 0 6 2 5 1 4
    batches of 3                                                       3 0 6 | 2 5 1 | 4

The order depends only on (samples, seed, epoch). The layout determines which part of it each
rank loads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from lockstep.kernel.errors import DatasetError
from lockstep.kernel.seeds import key

__all__ = ["EpochOrder", "epoch_permutation", "hash_indices"]


def epoch_permutation(samples: int, seed: int, epoch: int, shuffle: bool = True) -> torch.Tensor:
    """Return a permutation of `range(samples)`, int64.

    With `shuffle`, it is `torch.randperm` of a generator seeded with `key(seed, epoch)`;
    otherwise it is ascending.
    """
    if not shuffle:
        return torch.arange(samples)
    generator = torch.Generator().manual_seed(key(seed, epoch))
    return torch.randperm(samples, generator=generator)


@dataclass(frozen=True)
class EpochOrder:
    """The global batches of one epoch: `indices[starts[b]:starts[b + 1]]` is batch b.

    Attributes:
        indices: The indices of the samples, int64.
        starts: The first position of each batch.
        repeats: For each position, the number of earlier occurrences of its sample; None if no
            sample occurs twice. Each occurrence gets different random numbers.
    """

    indices: torch.Tensor
    starts: Sequence[int]
    repeats: torch.Tensor | None = None

    @classmethod
    def from_indices(
        cls, indices: torch.Tensor, batch_size: int, drop_last: bool = False
    ) -> EpochOrder:
        """Split an order into batches of `batch_size`.

        The last batch may be smaller; with `drop_last`, a smaller one is omitted.

        Raises:
            DatasetError: `drop_last` leaves no batch.
        """
        samples = len(indices) - len(indices) % batch_size if drop_last else len(indices)
        if drop_last and samples == 0:
            raise DatasetError(
                f"drop_last=True leaves no batch of {batch_size} samples: there are {len(indices)}"
            )
        return cls(indices[:samples], range(0, samples, batch_size))

    @classmethod
    def from_batches(cls, batches: Iterable[Sequence[int]]) -> EpochOrder:
        """Join the batches of a batch sampler."""
        flat: list[int] = []
        starts: list[int] = []
        for batch in batches:
            if len(batch) == 0:
                raise DatasetError(f"batch {len(starts)} of the batch sampler is empty")
            starts.append(len(flat))
            flat.extend(batch)
        return cls(torch.tensor(flat, dtype=torch.int64), starts).with_repeats()

    def with_repeats(self) -> EpochOrder:
        """Return this order with `repeats` computed."""
        return EpochOrder(self.indices, self.starts, _repeats(self.indices))

    def __len__(self) -> int:
        """Return the number of global batches."""
        return len(self.starts)

    def span(self, batch: int) -> range:
        """Return the positions of `batch` in the order."""
        last = batch + 1 == len(self.starts)
        return range(self.starts[batch], len(self.indices) if last else self.starts[batch + 1])

    def batch_indices(self, batch: int) -> torch.Tensor:
        """Return the indices of the samples of `batch`, int64."""
        span = self.span(batch)
        return self.indices[span.start : span.stop]

    def sample_seeds(self, seed: int, epoch: int, positions: Sequence[int]) -> list[int]:
        """Return the random seeds of the samples at some positions.

        A further occurrence of a sample in the epoch has another seed than the first one.
        """
        chosen = list(positions)
        indices = self.indices[chosen].tolist()
        if self.repeats is None:
            return [key(seed, epoch, index) for index in indices]
        repeats = self.repeats[chosen].tolist()
        return [
            key(seed, epoch, index, repeat) if repeat else key(seed, epoch, index)
            for index, repeat in zip(indices, repeats, strict=True)
        ]

    def digest(self) -> bytes:
        """Return a hash of the batches, 16 bytes."""
        starts = torch.tensor(self.starts, dtype=torch.int64)
        result = hashlib.blake2b(starts.numpy().tobytes(), digest_size=16)
        result.update(self.indices.contiguous().numpy().data)
        return result.digest()


def hash_indices(indices: torch.Tensor) -> str:
    """Return a hash of int64 indices, which depends on their order."""
    return xxhash.xxh3_64_hexdigest(indices.contiguous().numpy().data)


def _repeats(indices: torch.Tensor) -> torch.Tensor | None:
    """Return `EpochOrder.repeats`."""
    if len(indices.unique()) == len(indices):
        return None
    seen: dict[int, int] = {}
    repeats = torch.empty_like(indices)
    for position, index in enumerate(indices.tolist()):
        repeats[position] = seen.get(index, 0)
        seen[index] = seen.get(index, 0) + 1
    return repeats
