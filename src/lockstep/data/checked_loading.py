"""The repeatability check of micro-batches that torch's DataLoader loads.

    a worker, or this process    loads the samples of a list of indices, and calls `collate_fn`
                                 CheckedCollate: loads some of them twice more, collates twice
    this process                 load_checked: raises what was found, and compares samples with all
                                 ranks at the beginning of each epoch

The checks are those of `Trainer.batches` (`lockstep.data.repeatability`). Of a DataLoader, only the
`collate_fn` can be replaced after the construction, and the sampler sends nothing but the list of
indices (`SeededIndices`) to a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import Any, NamedTuple, cast

from torch.utils.data import DataLoader, default_collate

from lockstep.data.consistency import (
    GatherFn,
    compare_first,
    pack_described,
    require_same_epoch,
)
from lockstep.data.content_hash import hash_content
from lockstep.data.microbatch_sampler import MicrobatchSampler, SeededIndices
from lockstep.data.repeatability import check_samples, collate_and_check
from lockstep.kernel.errors import DatasetError
from lockstep.kernel.seeds import seed_all
from lockstep.processor_core import one_thread

__all__ = ["load_checked", "load_seeded"]


class CheckedItem(NamedTuple):
    """An item of a DataLoader that was checked.

    Attributes:
        data: The micro-batch.
        descriptions: Descriptions of samples of its batch, which must be equal on all ranks.
        failure: What is wrong with the dataset; "" for nothing.
    """

    data: Any
    descriptions: Sequence[str]
    failure: str


class CheckedCollate:
    """A `collate_fn` that calls another one with one thread, and checks some micro-batches.

    Args:
        collate: The `collate_fn` of the user, or torch's.
        dataset: The dataset, whose samples are loaded again.
    """

    def __init__(self, collate: Callable[[Any], Any], dataset: Any) -> None:
        self._collate = collate
        self._dataset = dataset

    @property
    def is_default(self) -> bool:
        """Whether the function is torch's, which draws no random numbers."""
        return self._collate is default_collate

    def __call__(self, samples: Any) -> Any:
        """Collate samples."""
        indices = SeededIndices.loaded
        SeededIndices.loaded = None  # a list without seeds may be the next one
        with one_thread():
            if indices is None or not indices.checks:
                return self._collate(samples)
            try:
                descriptions = self._check_samples(indices, samples)
                return CheckedItem(self._collate_twice(indices, samples), descriptions, "")
            except DatasetError as error:
                # torch would put the traceback of a worker into the message of an exception.
                return CheckedItem(None, (), str(error))

    def _check_samples(self, indices: SeededIndices, samples: Any) -> Sequence[str]:
        names = [index for index, _ in indices.checks]

        def load(position: int) -> Any:
            index, seed = indices.checks[position]
            seed_all(seed)
            return self._dataset[index]

        descriptions = check_samples(load, range(len(names)), names, self._dataset)
        if hasattr(self._dataset, "__getitems__"):
            self._require_seeded(indices, samples)
        return descriptions

    def _require_seeded(self, indices: SeededIndices, samples: Any) -> None:
        """Raise DatasetError if loading all samples in one call draws random numbers."""
        seed_all(indices.collate_seed ^ 1)  # other random numbers than in the first call
        again = self._dataset.__getitems__(indices.without_checks())
        if hash_content(list(samples)) != hash_content(list(again)):
            raise DatasetError(
                f"{type(self._dataset).__name__} loads other samples when its __getitems__ is "
                "called again: draw random numbers in __getitem__, where the generators are seeded "
                "for each sample, and leave __getitems__ out"
            )

    def _collate_twice(self, indices: SeededIndices, samples: Any) -> Any:
        def collate(pieces: Sequence[Any]) -> list[Any]:
            seed_all(indices.collate_seed)
            return [self._collate(piece) for piece in pieces]

        def load_again(pieces: Sequence[Any]) -> list[Any]:
            unchecked = indices.without_checks()
            return collate([[self._dataset[index] for index in unchecked] for _ in pieces])

        if self.is_default:
            return collate([samples])[0]
        return collate_and_check(collate, load_again, [samples])[0]


def load_checked(loader: Iterable[Any], gather: GatherFn | None = None) -> Generator[Any]:
    """Yield the items of a DataLoader of micro-batches, after the checks of `Trainer.batches`.

    Args:
        loader: A DataLoader whose batch sampler is that of `ls.exact`; anything else is iterated as
            it is.
        gather: A function that exchanges messages with all ranks, to compare samples; None for no
            comparison.

    Raises:
        DatasetError: A sample or a micro-batch differs between two loads.
        DisagreementError: The epoch or a sample differs between ranks.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, MicrobatchSampler):
        yield from loader
        return
    checked = cast("DataLoader[Any]", loader)
    collate = checked.collate_fn
    sampler.has_random_collate = collate is not default_collate and not (
        isinstance(collate, CheckedCollate) and collate.is_default
    )
    if gather is not None:  # otherwise a sample of another epoch would seem to be another sample
        settings = {
            "the epoch": sampler.epoch,
            "the first batch": sampler.start,
            "the training data": sampler.settings,
        }
        require_same_epoch(gather(pack_described(settings), "beginning an epoch"))
    yield from load_seeded(checked, gather)


def load_seeded(loader: DataLoader[Any], gather: GatherFn | None) -> Generator[Any]:
    """Yield the items of a DataLoader whose batch sampler yields `SeededIndices`.

    See `load_checked`, of which the sampler determines what is checked.
    """
    if not isinstance(loader.collate_fn, CheckedCollate):
        loader.collate_fn = CheckedCollate(loader.collate_fn, loader.dataset)
    with closing(compare_first((item for item in loader), gather)) as items:
        for item in items:
            if not isinstance(item, CheckedItem):
                yield item
                continue
            if item.failure:
                raise DatasetError(item.failure)
            yield item.data
