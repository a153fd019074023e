"""Every micro-batch has memory of its own: what a model writes there reaches nothing else."""

from collections import OrderedDict, namedtuple
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.data.loader import Batches
from lockstep.data.microbatch import clone_tensors, map_tensors, split_batch

Pair = namedtuple("Pair", "inputs targets")


class Held(Dataset[Any]):
    """Samples are views of what the dataset holds."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tensor = torch.arange(24.0).view(8, 3)
        self.array = numpy.arange(24.0).reshape(8, 3)
        self.buffer = torch.empty(8, 3)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.array[index] if "array" in self.kind else self.tensor[index]

    def collate(self, samples: list[Any]) -> Any:
        if self.kind == "reused buffer":
            return torch.stack(samples, out=self.buffer[: len(samples)].zero_())
        if self.kind == "pair":
            return Pair(samples[0][None], samples[0][None, :1])
        if self.kind == "mapping":
            return OrderedDict(x=[samples[0][None]])
        if self.kind == "tensor of an array":
            return torch.from_numpy(samples[0][None])
        return samples[0][None]


def spoil(data: Any) -> list[list[float]]:
    """Return the values of a micro-batch, and write over them."""
    found: list[list[float]] = []

    def visit(value: Any) -> None:
        found.append(numpy.asarray(value).reshape(-1).tolist())
        value *= 0

    map_tensors(visit, data, (torch.Tensor, numpy.ndarray))
    return found


KINDS = ["view", "array view", "tensor of an array", "pair", "mapping", "reused buffer"]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_writing_into_a_micro_batch_does_not_reach_the_dataset(kind: str, num_workers: int) -> None:
    """The second epoch, and with workers a sample's later draws, had other values."""
    dataset = Held(kind)
    drawn = [0, 1, 2, 3] * 10
    batches = Batches(
        dataset,
        8,
        sampler=drawn,
        num_workers=num_workers,
        collate_fn=dataset.collate,
    )
    for _ in range(2):
        parts = [part.data for batch in batches for part in batch.microbatches]
        values = [spoil(part)[0] for part in parts]
        assert values == [[3.0 * index, 3.0 * index + 1, 3.0 * index + 2] for index in drawn]


@pytest.mark.parametrize("replicas", [1, 2])
def test_micro_batches_of_a_stream_have_memory_of_their_own(replicas: int) -> None:
    class Endless(IterableDataset[Any]):
        def __init__(self) -> None:
            self.buffer = torch.zeros(1)

        def __iter__(self) -> Any:
            for number in range(8):
                yield self.buffer.fill_(number)

    dataset = Endless()
    for replica in range(replicas):
        batches = Batches(
            dataset,
            1,
            microbatches=replicas,
            replicas=replicas,
            replica=replica,
            collate_fn=lambda samples: samples[0],
        )
        parts = [part.data for batch in batches for part in batch.microbatches]
        assert [part.tolist() for part in parts] == [[n] for n in range(8) if replica == 0]


def test_a_tensor_that_is_there_twice_stays_one() -> None:
    x = torch.ones(3)
    first, (second, third) = clone_tensors((x, [x, x + 1]))
    assert first is second
    assert first is not x
    assert first.data_ptr() not in (x.data_ptr(), third.data_ptr())


def test_a_transposed_tensor_stays_transposed() -> None:
    x = torch.arange(6.0).view(2, 3).t()
    assert clone_tensors(x).stride() == x.stride()


def test_arrays_of_a_whole_batch_are_copied_too() -> None:
    array = numpy.arange(4.0)
    batch = split_batch((torch.arange(4.0), array), ReplicaShare(2, on_one_host(1), 0))
    for microbatch in batch.microbatches:
        spoil(microbatch.data)
    assert array.tolist() == [0, 1, 2, 3]
