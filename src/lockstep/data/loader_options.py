"""The options of a loader that users pass, and what follows from them alone."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data import IterableDataset

from lockstep.data.epoch_order import EpochOrder, epoch_permutation
from lockstep.data.map_dataset import Collate
from lockstep.data.samplers import draw_batches, draw_indices, validate_sampler
from lockstep.kernel.errors import DatasetError

__all__ = ["LoaderOptions", "count_samples_of"]


@dataclass(frozen=True)
class LoaderOptions:
    """The options of `Batches` that depend neither on the layout nor on the epoch.

    Args:
        dataset: A map-style dataset, or an iterable dataset, which is split by position; all ranks
            must read the same stream.
        batch_size: The number of samples of a global batch, over all ranks.
        seed: The random seed of order and augmentation.
        shuffle: Whether to shuffle the samples.
        sampler: A sampler that determines the order instead of `shuffle`. It yields indices of
            the whole dataset, the same on all ranks.
        batch_sampler: A sampler that yields whole global batches, instead of `batch_size`,
            `shuffle`, `sampler` and `drop_last`.
        num_workers: The number of processes that load and collate. Not used for a
            `TensorDataset` without `collate_fn`, whose rows are selected in this process.
        collate_fn: A function that makes a micro-batch of a list of samples; None for torch's
            `default_collate`.
        pin_memory: Whether to copy tensors to pinned memory if there is an accelerator.
        drop_last: Whether to omit the last batch if it is smaller.
        timeout: The longest wait for a batch from the workers, in seconds.

    Raises:
        DatasetError: An option is invalid, or the dataset is empty or not a dataset.
    """

    dataset: Any
    batch_size: int | None = None
    seed: int = 0
    shuffle: bool = True
    sampler: Iterable[int] | None = None
    batch_sampler: Iterable[Sequence[int]] | None = None
    num_workers: int = 0
    collate_fn: Collate | None = None
    pin_memory: bool = False
    drop_last: bool = False
    timeout: float = 600.0

    def __post_init__(self) -> None:
        """Raise DatasetError if an option is invalid."""
        size = self.batch_size
        if self.batch_sampler is None and size is None:
            raise DatasetError(
                "the global batch size is missing: pass batch_size=, the number of samples of a "
                "batch over all ranks"
            )
        if size is not None and (not hasattr(size, "__index__") or size < 1):
            raise DatasetError(f"the global batch size is {size!r}; it must be an integer from 1")
        if self.batch_sampler is not None and not (
            size is None and self.sampler is None and not self.drop_last
        ):
            raise DatasetError(
                "a batch_sampler yields whole batches: omit batch_size, sampler and drop_last"
            )
        if self.is_iterable and self.given_sampler is not None:
            raise DatasetError(
                f"{self.name} is iterable, and iterable datasets cannot take a sampler"
            )
        is_empty = count_samples_of(self.dataset) == 0
        if not self.is_iterable and self.given_sampler is None and is_empty:
            raise DatasetError(f"the dataset {self.name} is empty")
        validate_sampler(self.given_sampler)
        if self.num_workers < 0 or self.timeout <= 0:
            raise DatasetError("num_workers must not be negative, and timeout must be positive")
        if self.num_workers > 0 and multiprocessing.current_process().daemon:
            raise DatasetError(
                "a daemon process cannot start loader workers; use num_workers=0, "
                "or start the ranks with daemon=False"
            )

    @property
    def name(self) -> str:
        """The name of the dataset, for messages."""
        return type(self.dataset).__name__

    @property
    def given_sampler(self) -> Any:
        """The user's sampler or batch sampler; None if there is none."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset is iterable; DatasetError if it is not a dataset."""
        if isinstance(self.dataset, IterableDataset):
            return True
        if hasattr(self.dataset, "__getitem__"):
            if count_samples_of(self.dataset) is None:
                raise DatasetError(f"the dataset {self.name} has no length; define __len__")
            return False
        if hasattr(self.dataset, "__iter__"):
            return True
        raise DatasetError(f"{self.name} is not a dataset: it has neither __getitem__ nor __iter__")

    def count_batches(self) -> int:
        """Return the number of batches of an epoch; TypeError if a length is missing."""
        if self.batch_sampler is not None:
            return len(cast("Sequence[Any]", self.batch_sampler))
        samples = len(cast("Sequence[Any]", self.dataset if self.sampler is None else self.sampler))
        size = cast(int, self.batch_size)
        return samples // size if self.drop_last else -(-samples // size)

    def make_order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch of a map-style dataset."""
        if self.batch_sampler is not None:
            return draw_batches(self.batch_sampler, self.seed, epoch)
        size = cast(int, self.batch_size)
        if self.sampler is not None:
            return draw_indices(self.sampler, size, self.seed, epoch, self.drop_last)
        order = epoch_permutation(len(self.dataset), self.seed, epoch, self.shuffle)
        return EpochOrder.from_indices(order, size, self.drop_last)

    def describe(self, epoch: int) -> dict[str, int | bool | None]:
        """Return what must be the same when an epoch is resumed."""
        return {
            "samples": count_samples_of(self.dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "epoch": epoch,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }


def count_samples_of(dataset: Any) -> int | None:
    """Return the length of a dataset; None if it has none."""
    try:
        return len(dataset)
    except (TypeError, ValueError, NotImplementedError):
        return None
