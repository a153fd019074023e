"""The batch of a step: which micro-batches of it this rank has, and what identifies it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from lockstep.kernel.errors import UsageError
from lockstep.kernel.splitting import split_evenly

__all__ = ["Batch", "BatchIdentity", "Microbatch"]


@dataclass(frozen=True)
class BatchIdentity:
    """The identity of a batch, equal on all ranks that train on it.

    Attributes:
        epoch: The epoch of a batch from a loader.
        position: The index of a batch from a loader within its epoch, from 0.
        order: A digest of the epoch's order for a batch from a loader; "" for iterable datasets.
        checksum: A hash of the content of a batch that was passed as a whole.
        samples: A hash of the indices of the batch's samples, for the record; ranks compare
            `order` instead.
    """

    epoch: int = -1
    position: int = -1
    order: str = ""
    checksum: str = ""
    samples: str = ""

    def pack(self) -> str:
        """Return the fields that ranks compare, as one line."""
        return f"{self.epoch} {self.position} {self.order or '-'} {self.checksum or '-'}"


@dataclass(slots=True)
class Microbatch:
    """One micro-batch: leaf `index` of the batch's tree, with `size` samples; do not change it."""

    index: int
    size: int
    data: Any


@dataclass
class Batch:
    """One rank's part of a global batch.

    Attributes:
        size: The number of samples of the global batch.
        leaves: The number of micro-batches of the global batch.
        microbatches: The micro-batches of this rank's replica, in ascending order.
        epoch: The epoch of the batch.
        seconds: The time that this rank waited for the data, in seconds.
        identity: The identity of the batch, equal on all ranks.
        indices: The indices of the global batch's samples in the dataset, int64; None for a batch
            that does not come from a map-style dataset.
        share: The share to which the micro-batches belong; None if unknown.
        load: A function that loads the micro-batches of another share; None if the data cannot be
            loaded again.
    """

    size: int
    leaves: int
    microbatches: tuple[Microbatch, ...]
    epoch: int = 0
    seconds: float = 0.0
    identity: BatchIdentity = BatchIdentity()
    indices: torch.Tensor | None = field(default=None, compare=False, repr=False)
    share: object | None = field(default=None, compare=False, repr=False)
    load: Callable[[Any], tuple[Microbatch, ...]] | None = field(
        default=None, compare=False, repr=False
    )

    def for_share(self, share: object) -> Batch:
        """Return the batch with the micro-batches of a share; load them if this has others."""
        if self.load is None or self.share == share:
            return self
        return replace(self, microbatches=self.load(share), share=share)

    def sample_indices(self, microbatch: int) -> tuple[int, ...] | None:
        """Return the indices of the samples of a micro-batch; None if they are unknown."""
        if self.indices is None:
            return None
        span = split_evenly(self.size, self.leaves)[microbatch]
        return tuple(self.indices[span.start : span.stop].tolist())

    def __iter__(self) -> NoReturn:
        """Raise UsageError: a batch cannot be unpacked like a batch of a DataLoader."""
        raise UsageError(
            "a batch is this rank's part in micro-batches and cannot be unpacked: pass it whole to "
            "trainer.step(batch), or write `with trainer.manual_step() as step:` and `for inputs, "
            "targets in step.microbatches(batch):` for a loop of your own"
        )
