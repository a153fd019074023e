"""Conversion of the user's data, a dataset of samples or a DataLoader, to arguments of `Batches`.

    DataLoader(dataset, 64, shuffle=True, num_workers=2)
        ──> dataset, batch_size=64, shuffle=True, num_workers=2

A DataLoader is not iterated: each rank loads its own part of every batch, with the same bits as
from the dataset with the same options. A DataLoader whose options cannot be extracted raises an
error, and so does data that is already in batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from lockstep.data.map_dataset import Collate
from lockstep.data.samplers import sampler_chain
from lockstep.kernel.errors import DatasetError, UsageError

__all__ = ["BatchOptions", "EvaluationOptions", "resolve_data"]


class BatchOptions(TypedDict, total=False):
    """The options of `batches` that a DataLoader has, too; see `LoaderOptions` for each."""

    shuffle: bool
    sampler: Iterable[int] | None
    batch_sampler: Iterable[Sequence[int]] | None
    num_workers: int
    collate_fn: Collate | None
    pin_memory: bool
    drop_last: bool
    timeout: float


class EvaluationOptions(BatchOptions, total=False):
    """The options of `evaluate` and `predict`; seed and epoch decide the random numbers."""

    seed: int
    epoch: int


OPTIONS = tuple(BatchOptions.__annotations__)
"""The options, other than `batch_size`, that both `Batches` and a DataLoader have."""

UNUSED = {
    "worker_init_fn": "random numbers are seeded for every sample in any worker, and files can be "
    "opened in the dataset",
    "multiprocessing_context": "workers are started by Lockstep",
}
"""The arguments of a DataLoader that could change its samples but do not exist here, with the
reason."""


def resolve_data(
    dataset: Any, batch_size: int | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `Batches` for the user's data.

    Args:
        dataset: A dataset, or a DataLoader with the global batch size.
        batch_size: The global batch size; None with a DataLoader or a batch sampler.
        options: Further options of `Batches`; with a DataLoader, only options that it lacks.

    Raises:
        DatasetError: The data is not a dataset of samples, the options of the DataLoader cannot be
            extracted, or an option is passed together with it.
        UsageError: An option does not exist.
    """
    if unknown := options.keys() - EvaluationOptions.__annotations__.keys():
        name = min(unknown)
        raise UsageError(
            f"there is no option {name}"
            + (f", because {UNUSED[name]}" if name in UNUSED else "")
            + f"; the options are {', '.join(OPTIONS)}, seed and epoch"
        )
    given = {"batch_size": batch_size, **options}
    if given.get("shuffle") and given.get("sampler") is not None:
        raise DatasetError("the sampler decides the order: omit shuffle=True, or the sampler")
    if not isinstance(dataset, DataLoader):
        _require_samples(dataset, batch_size)
        return {"dataset": dataset, **given}
    own = _take_apart(dataset)
    _require_samples(own["dataset"], own["batch_size"])
    for name in ("batch_size", *OPTIONS):
        if given.get(name) is not None:
            theirs = "its own " + name if own.get(name) is None else f"{name}={_show(own[name])}"
            raise DatasetError(
                f"{name}={_show(given[name])} is passed together with a DataLoader that has "
                f"{theirs}: pass the DataLoader alone, or its dataset with all options"
            )
    return {name: value for name, value in given.items() if value is not None} | own


def _take_apart(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the dataset and the options of a DataLoader."""
    instead = "pass its dataset, batch_size= (over all ranks) and the other options instead"
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise DatasetError(
            f"a {type(loader).__name__} overrides __iter__, so it cannot be split over the ranks: "
            f"{instead}"
        )
    if any(isinstance(sampler, DistributedSampler) for sampler in sampler_chain(loader)):
        raise DatasetError(
            "the DataLoader has a DistributedSampler, but Lockstep splits every batch over the "
            "ranks itself: remove the sampler and pass shuffle=True; batch_size then counts the "
            "samples of all ranks"
        )
    for name, reason in UNUSED.items():
        if getattr(loader, name, None) is not None:
            raise DatasetError(f"the DataLoader has a {name}: omit it, because {reason}")
    own = {
        "dataset": loader.dataset,
        "batch_size": loader.batch_size,
        "batch_sampler": loader.batch_sampler if loader.batch_size is None else None,
        "num_workers": loader.num_workers,
        "collate_fn": None if loader.collate_fn is default_collate else loader.collate_fn,
        "pin_memory": loader.pin_memory,
        **({"timeout": loader.timeout} if loader.timeout else {}),
    }
    if loader.batch_size is not None:
        return own | {"drop_last": loader.drop_last} | _order(loader)
    if loader.batch_sampler is None:
        raise DatasetError(
            "the DataLoader has batch_size=None, so each item of its dataset is a whole batch, "
            "which cannot be split over the ranks: give it a batch size and a dataset of samples"
        )
    return own


def _order(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options for the order of the samples; none for an iterable dataset."""
    sampler: Any = loader.sampler
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return {}
    if type(sampler) is SequentialSampler and len(sampler) == len(dataset):
        return {"shuffle": False}
    if (
        type(sampler) is RandomSampler
        and sampler.data_source is dataset
        and sampler.generator is None
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return {"shuffle": True}
    return {"sampler": sampler}


def _require_samples(dataset: Any, batch_size: int | None) -> None:
    """Raise DatasetError for objects that are easily mistaken for a dataset of samples."""
    name = type(dataset).__name__
    instead = "pass a dataset of samples, or a DataLoader"
    if hasattr(dataset, "__next__"):
        kind = "a generator" if inspect.isgenerator(dataset) else f"the iterator {name}"
        raise DatasetError(
            f"{kind} can be read only once, and every rank reads its data in every epoch: "
            f"{instead}; to train on your own whole batches, call trainer.step(batch)"
        )
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise DatasetError(
            f"a {name} is not a dataset of samples: pass a torch.utils.data.TensorDataset of its "
            "tensors, or a list with one entry per sample"
        )
    if isinstance(dataset, (list, tuple)):
        _require_rows(dataset, batch_size)
    is_loader = hasattr(dataset, "batch_size") and hasattr(dataset, "dataset")
    if (
        is_loader
        and not hasattr(dataset, "__getitem__")
        and not isinstance(dataset, IterableDataset)
    ):
        raise DatasetError(f"a {name} yields batches, not samples: {instead} of torch")


def _require_rows(given: list[Any] | tuple[Any, ...], batch_size: int | None) -> None:
    """Raise DatasetError for a list of whole columns, or of whole batches."""
    count = len(given)
    kind = type(given).__name__
    lengths = {_column_length(column) for column in given[:3]}
    if 1 < count <= 3 and len(lengths) == 1 and None not in lengths:
        kinds = {(column.ndim, getattr(column, "dtype", None)) for column in given}
        if isinstance(given, tuple) or len(kinds) > 1:
            raise DatasetError(
                f"a {kind} of {count} tensors is read as {count} samples: pass "
                f"torch.utils.data.TensorDataset(*tensors), which has {lengths.pop()}"
            )
    if not given or _batch_length(given[0]) is None:
        return
    *whole, last = [_batch_length(batch) or 0 for batch in given]
    if len(set(whole)) == 1 and last > 0 and (whole[0] == batch_size or last < whole[0]):
        raise DatasetError(
            f"a {kind} of {count} batches is read as {count} samples: pass the dataset or the "
            "DataLoader that they come from, or each batch to trainer.step(batch)"
        )


def _column_length(value: Any) -> int | None:
    """Return the first dimension of a tensor or array; None for anything else."""
    return int(value.shape[0]) if len(getattr(value, "shape", ())) else None


def _batch_length(value: Any) -> int | None:
    """Return the number of samples of a batch that `default_collate` made; None for a sample."""
    if type(value) is not list or len(value) < 2:
        return None
    lengths = {_column_length(column) for column in value}
    return lengths.pop() if len(lengths) == 1 else None


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
