"""A stream that depends on earlier iterations is reported; one that is seeded passes."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from lockstep.data.loader import Batches
from lockstep.kernel.errors import DatasetError


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return map(torch.tensor, self.numbers())

    def numbers(self) -> Iterator[int]:
        yield from range(20)


class OwnOrder(Stream):
    def numbers(self) -> Iterator[int]:
        yield from self.rng.sample(range(20), 20)


class OwnNoise(Stream):
    """Its generator changes almost no sample, but is advanced by each."""

    def numbers(self) -> Iterator[int]:
        for number in range(20):
            yield number + (self.rng.random() > 0.9999)


class LateNoise(Stream):
    """Its generator is advanced by the last sample."""

    def numbers(self) -> Iterator[int]:
        yield from range(19)
        yield self.rng.randrange(20)


class Epochs(Stream):
    def numbers(self) -> Iterator[int]:
        yield from range(self.count, 20)
        self.count += 1


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "said", "batches_before"),
    [
        (OwnOrder, "gives different results, because it depends on something that is not", 0),
        (OwnNoise, "draws from a private generator", 0),
        (LateNoise, "draws from a private generator", 3),
        (Epochs, "gives different results", 3),
    ],
)
def test_a_stream_that_depends_on_earlier_iterations_is_named(
    dataset: Any, said: str, batches_before: int, num_workers: int
) -> None:
    """A resumed run, which skips finished epochs, trained other samples."""
    batches = Batches(dataset(), 8, num_workers=num_workers)
    words = rf"^sample 0 of {dataset.__name__}, loaded twice with the same random seed, ({said})"
    with pytest.raises(DatasetError, match=words):
        list(batches)
    assert batches.position == batches_before


class Seeded(Stream):
    """A generator that is seeded as it should be, and numbers without effect."""

    def numbers(self) -> Iterator[int]:
        self.rng.seed(random.getrandbits(64))
        for number in self.rng.sample(range(20), 20):
            self.count += 1
            yield number


class Cursor(IterableDataset[Any]):
    """Its own iterator, of which only the newest is valid."""

    def __iter__(self) -> Iterator[Any]:
        self.rng = random.Random(random.random())
        self.number = -1
        return self

    def __next__(self) -> Any:
        self.number += 1
        if self.number == 20:
            raise StopIteration
        return torch.tensor(self.number)


class Once(Stream):
    """Can be read only once, and counts what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.source = iter(range(20))

    def numbers(self) -> Iterator[int]:
        for number in self.source:
            self.count += 1
            yield number


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("dataset", [Stream, Seeded, Cursor, Once])
def test_a_stream_that_is_seeded_is_read_to_its_end(dataset: Any, num_workers: int) -> None:
    batches = Batches(dataset(), 8, num_workers=num_workers)
    parts = [part.data for batch in batches for part in batch.microbatches]
    assert sorted(torch.cat(parts).tolist()) == list(range(20))


class Empty(Stream):
    """Has no sample, and counts."""

    def numbers(self) -> Iterator[int]:
        self.count += 1
        yield from range(20 if self.count > 1 else 0)


def test_an_empty_stream_is_not_read_again() -> None:
    with pytest.raises(DatasetError, match=r"^the dataset Empty has no samples"):
        list(Batches(Empty(), 8))


def test_a_stream_without_state_is_read_once() -> None:
    begun = []

    class Counted(Stream):
        def numbers(self) -> Iterator[int]:
            begun.append(1)
            yield from range(20)

    assert len(list(Batches(Counted(), 8))) == 3
    assert begun == [1]
