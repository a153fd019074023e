"""A DataLoader is taken apart: the batches of its dataset with the same options."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lockstep.data.dataloader import resolve_data
from lockstep.data.loader import Batches
from lockstep.kernel.errors import DatasetError, UsageError


class Noisy(Dataset[Any]):
    """Sample i is (i, a draw)."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)), torch.rand(())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (torch.tensor(float(number)) + torch.rand(()) for number in range(11))


def negate(samples: list[Any]) -> Any:
    return [-each for each in default_collate(samples)]


def rows(dataset: Any, *given: int, replicas: int = 2, **options: Any) -> list[Any]:
    """Return the data of every batch of an epoch, from the micro-batches of all replicas."""
    options = resolve_data(dataset, *(given or (None,)), {"seed": 3, "epoch": 1} | options)
    epochs = [Batches(**options, replicas=replicas, replica=rank) for rank in range(replicas)]
    found = []
    for parts in zip(*epochs, strict=True):
        found.append([each.data for part in parts for each in part.microbatches])
    return found


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(8)


NOISY = Noisy()
TABLE = TensorDataset(torch.arange(21.0))
STREAM = Stream()
REVERSED = list(range(20, -1, -1))


@pytest.mark.parametrize(
    ("loader", "dataset", "options"),
    [
        (lambda: DataLoader(NOISY, 8), NOISY, {"batch_size": 8, "shuffle": False}),
        (lambda: DataLoader(NOISY, 8, shuffle=True), NOISY, {"batch_size": 8}),
        (lambda: DataLoader(TABLE, 8, shuffle=True), TABLE, {"batch_size": 8}),
        (
            lambda: DataLoader(NOISY, 8, shuffle=True, drop_last=True, timeout=0, pin_memory=True),
            NOISY,
            {"batch_size": 8, "drop_last": True},
        ),
        (
            lambda: DataLoader(NOISY, 8, collate_fn=negate, generator=generator()),
            NOISY,
            {"batch_size": 8, "shuffle": False, "collate_fn": negate},
        ),
        (
            lambda: DataLoader(
                NOISY, 8, num_workers=1, timeout=60, persistent_workers=True, prefetch_factor=3
            ),
            NOISY,
            {"batch_size": 8, "shuffle": False, "num_workers": 1},
        ),
        (
            lambda: DataLoader(NOISY, 8, sampler=SequentialSampler(range(5))),
            NOISY,
            {"batch_size": 8, "sampler": lambda: range(5)},
        ),
        (
            lambda: DataLoader(NOISY, 8, sampler=WeightedRandomSampler([1.0] * 21, 12)),
            NOISY,
            {"batch_size": 8, "sampler": lambda: WeightedRandomSampler([1.0] * 21, 12)},
        ),
        (
            lambda: DataLoader(NOISY, 8, sampler=RandomSampler(NOISY, num_samples=9)),
            NOISY,
            {"batch_size": 8, "sampler": lambda: RandomSampler(NOISY, num_samples=9)},
        ),
        (
            lambda: DataLoader(NOISY, batch_sampler=BatchSampler(REVERSED, 9, True)),
            NOISY,
            {"batch_sampler": lambda: BatchSampler(REVERSED, 9, True)},
        ),
        (lambda: DataLoader(STREAM, 4), STREAM, {"batch_size": 4}),
        (lambda: DataLoader(STREAM, 4, drop_last=True), STREAM, {"batch_size": 4, "drop_last": 1}),
    ],
    ids=[
        "in order", "shuffled", "tensors", "drop_last", "collate_fn", "workers",
        "part", "weighted", "few", "batch_sampler", "stream", "short stream",
    ],
)  # fmt: skip
def test_a_data_loader_gives_the_batches_of_its_dataset(
    loader: Callable[[], DataLoader[Any]], dataset: Any, options: dict[str, Any]
) -> None:
    made = {
        name: value() if "sampler" in name else value for name, value in options.items()
    }  # fmt: skip
    expected = rows(dataset, made.pop("batch_size", None), **made)
    assert len(expected) > 0
    found = rows(loader())
    assert len(found) == len(expected)
    for theirs, ours in zip(found, expected, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=0)


class Looped(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from ()


class Prefetcher:
    """A loader of another library."""

    def __init__(self) -> None:
        self.dataset = NOISY
        self.batch_size = 4

    def __iter__(self) -> Any:
        yield from ()


def ignore(worker: int) -> None:
    raise AssertionError(worker)


X = torch.randn(20, 6)
Y = torch.randint(0, 3, (20,))
PAIRS = TensorDataset(X, Y)
WITH_DISTRIBUTED = DistributedSampler(NOISY, num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("dataset", "options", "sentence"),
    [
        (
            DataLoader(NOISY, 8),
            {"batch_size": 16},
            "^batch_size=16 is passed together with a DataLoader that has batch_size=8",
        ),
        (DataLoader(NOISY, 8), {"shuffle": True}, "^shuffle=True .* that has shuffle=False"),
        (
            DataLoader(NOISY, 8, sampler=REVERSED),
            {"shuffle": False},
            "^shuffle=False is passed together with a DataLoader that has its own shuffle",
        ),
        (
            DataLoader(NOISY, 8, sampler=WITH_DISTRIBUTED),
            {},
            "^the DataLoader has a DistributedSampler",
        ),
        (DataLoader(NOISY, 8, worker_init_fn=ignore), {}, "has a worker_init_fn: omit it"),
        (
            DataLoader(NOISY, 8, num_workers=1, multiprocessing_context="spawn"),
            {},
            "has a multiprocessing_context: omit it, because workers are started by Lockstep",
        ),
        (DataLoader(NOISY, batch_size=None), {}, "^the DataLoader has batch_size=None, so each"),
        (Looped(NOISY, 8), {}, "^a Looped overrides __iter__"),
        (Prefetcher(), {"batch_size": 8}, "^a Prefetcher yields batches, not samples: pass a data"),
        (iter(DataLoader(NOISY, 8)), {}, "^the iterator _SingleProcessDataLoaderIter can be read"),
        ((each for each in DataLoader(NOISY, 8)), {"batch_size": 8}, "^a generator can be read on"),
        ([X, Y], {"batch_size": 8}, r"^a list of 2 tensors is read as 2 samples: .* which has 20$"),
        ((X, X), {"batch_size": 8}, r"^a tuple of 2 tensors is read as 2 samples: .* has 20$"),
        ({"x": X, "y": Y}, {"batch_size": 8}, "^a dict is not a dataset of samples: pass a torch"),
        (list(DataLoader(PAIRS, 8)), {"batch_size": 4}, "^a list of 3 batches is read as 3 sample"),
        (list(DataLoader(PAIRS, 10)), {"batch_size": 10}, "^a list of 2 batches is read as 2 sam"),
    ],
    ids=lambda value: "" if isinstance(value, (str, dict)) else type(value).__name__,
)
def test_what_cannot_be_taken_apart_is_named(dataset: Any, options: Any, sentence: str) -> None:
    """A loader was read as a dataset each of whose samples is a batch."""
    with pytest.raises(DatasetError, match=sentence):
        resolve_data(dataset, options.pop("batch_size", None), options)


@pytest.mark.parametrize(
    "dataset",
    [
        [X[0], X[1], X[2]],  # rows
        [torch.zeros(3, 4), torch.zeros(3, 5), torch.zeros(3, 6), torch.zeros(3, 6)],  # pictures
        [(X[0], Y[0]), (X[1], Y[1])],
        [[X[0], Y[:6]], [X[1], Y[6:12]]],  # sequences of one length
        [[X[0], Y[:6]], [X[1], Y[6:12]], [X[2], Y[:6]]],
        [{"x": X[0]}, {"x": X[1]}],
        {0: X, 1: Y},
        range(4),
        [],
        STREAM,
        Subset(PAIRS, [1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_datasets_of_samples_pass(dataset: Any) -> None:
    assert resolve_data(dataset, 2, {}) == {"dataset": dataset, "batch_size": 2}


def test_an_option_that_there_is_not_is_named() -> None:
    for name, sentence in {
        "persistent_workers": "^there is no option persistent_workers; the options are shuffle, sa",
        "worker_init_fn": "^there is no option worker_init_fn, because random numbers are seeded",
    }.items():
        with pytest.raises(UsageError, match=sentence):
            resolve_data(NOISY, 8, {name: ignore})
