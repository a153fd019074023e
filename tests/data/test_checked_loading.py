"""Micro-batches of torch's DataLoader: what is not seeded shows, and `collate_fn` is seeded."""

import json
import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.data.checked_loading import load_checked
from lockstep.data.microbatch_sampler import LoadedHere, MicrobatchSampler
from lockstep.kernel.errors import DatasetError, DisagreementError

TENSORS = TensorDataset(torch.arange(24.0))


def make(
    dataset: Any, ranks: int = 1, rank: int = 0, collate: Any = default_collate, **options: Any
) -> DataLoader[Any]:
    sampler = MicrobatchSampler(
        dataset, 8, True, 3, False, ReplicaShare(4, on_one_host(ranks), rank)
    )
    options.setdefault("generator", torch.Generator())  # else torch draws a seed of workers
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, **options)


def load(dataset: Any, ranks: int = 1, **options: Any) -> list[Any]:
    """Return the micro-batches of all ranks in their order, three batches of four."""
    parts = [[*load_checked(make(dataset, ranks, rank, **options))] for rank in range(ranks)]
    own = 4 // ranks
    return [part[own * batch + turn] for batch in range(3) for part in parts for turn in range(own)]


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.full((), float(index))


class Noisy(Numbers):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + torch.rand(()) + random.random() + numpy.random.rand()


class Own(Numbers):
    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + self.rng.normal()


class Counting(Numbers):
    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return super().__getitem__(index) + self.calls


class Listed(Numbers):
    """Loads samples in lists, and draws for each list."""

    def __getitems__(self, indices: Any) -> Any:
        noise = torch.rand(())
        return [self[index] + noise for index in indices]


class OwnCollate:
    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(0)

    def __call__(self, samples: Any) -> Any:
        return default_collate(samples), self.rng.normal()


def mix(samples: Any) -> Any:
    (values,) = default_collate(samples)
    weight = numpy.random.beta(0.4, 0.4)
    return weight * values + (1 - weight) * values[torch.randperm(len(values))]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("dataset", "collate"), [(Noisy(), default_collate), (TENSORS, mix)])
def test_random_numbers_do_not_depend_on_the_number_of_ranks(
    dataset: Any, collate: Any, num_workers: int
) -> None:
    """A TensorDataset's `collate_fn` was not seeded."""
    expected = torch.stack(load(dataset, collate=collate))
    assert len(expected.unique()) == expected.numel()
    for ranks in (1, 2, 4):
        found = load(dataset, ranks, collate=collate, num_workers=num_workers)
        assert torch.equal(torch.stack(found), expected)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "collate", "said"),
    [
        (Own, default_collate, r"sample \d+ of Own, loaded twice with the same random seed, gives"),
        (Counting, default_collate, r"sample \d+ of Counting, loaded twice"),
        (Listed, default_collate, "Listed loads other samples when its __getitems__ is called"),
        (lambda: TENSORS, OwnCollate(), "collate_fn, called twice with the same random seed, "),
    ],
)
def test_what_depends_on_earlier_calls_is_named(
    dataset: Any, collate: Any, said: str, num_workers: int
) -> None:
    with pytest.raises(DatasetError, match=f"^{said}"):
        load(dataset(), collate=collate, num_workers=num_workers)


def test_the_first_and_every_hundredth_batch_of_an_epoch_are_checked() -> None:
    calls = list[int]()

    class Recording(Numbers):
        def __len__(self) -> int:
            return 1608

        def __getitem__(self, index: int) -> Any:
            calls.append(index)
            return super().__getitem__(index)

    for _ in load_checked(make(Recording())):
        pass
    often = {index for index in calls if calls.count(index) > 1}
    indices = [*make(Recording()).batch_sampler]
    checked = {
        index for batch in (0, 100, 200) for part in indices[4 * batch :][:4] for index in part
    }
    assert len(often) >= 3
    assert often <= checked


def test_the_generators_are_those_from_before_the_loading() -> None:
    """The first list of an epoch has seeds, and those of a TensorDataset after it have none."""
    for dataset in (TENSORS, Noisy()):
        for begin in (0, 1, 2):
            items = load_checked(make(dataset))
            for _ in range(4 * begin):
                next(items)
            LoadedHere.end()
            before = torch.get_rng_state()
            next(items)
            LoadedHere.end()
            assert torch.equal(torch.get_rng_state(), before)


def test_samples_that_differ_between_ranks_are_named() -> None:
    def gather(message: bytes, about: str) -> list[bytes]:
        if about == "beginning an epoch":
            return [message] * 3
        samples = json.loads(message)
        assert samples
        return [message, message, json.dumps([samples[0] + "0", *samples[1:]]).encode()]

    with pytest.raises(
        DisagreementError, match=r"sample \d+ of rank 2 differs from that of rank 0"
    ):
        next(load_checked(make(TENSORS), gather))


def test_a_rank_that_fails_sends_its_message() -> None:
    """The others would wait for it."""

    class Damaged(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("damaged")

    messages = list[bytes]()

    def gather(message: bytes, about: str) -> list[bytes]:
        if about != "beginning an epoch":
            messages.append(message)
        return [message]

    with pytest.raises(ValueError, match="damaged"):
        next(load_checked(make(Damaged()), gather))
    assert messages == [b"[]"]


def test_another_loader_is_iterated_as_it_is() -> None:
    loader = DataLoader(TENSORS, 3, collate_fn=len)
    assert [*load_checked(loader)] == [3] * 8
    assert loader.collate_fn is len
