"""Random numbers in a collate function: those of the micro-batch, on any rank."""

import random
from typing import Any

import numpy
import pytest
import torch

from lockstep.data.loader import Batches
from lockstep.kernel.seeds import key, seed_all


def draw() -> list[float]:
    return [float(torch.rand(())), random.random(), float(numpy.random.random())]


def collate(samples: list[Any]) -> torch.Tensor:
    return torch.tensor(draw(), dtype=torch.float64)


def drawn(stream: bool, replicas: int, **options: Any) -> dict[tuple[int, int], list[float]]:
    """Return the numbers of each micro-batch, by batch and micro-batch."""
    found = {}
    for replica in range(replicas):
        dataset: Any = iter(range(43)) if stream else list(range(43))
        batches = Batches(dataset, 8, microbatches=3, replicas=replicas, replica=replica, **options)
        for number, batch in enumerate(batches):
            for part in batch.microbatches:
                found[number, part.index] = part.data.tolist()
    return found


@pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
def test_they_depend_on_the_batch_and_the_micro_batch_only(stream: bool) -> None:
    options = {"collate_fn": collate, "seed": 1, "epoch": 2}
    alone = drawn(stream, 1, **options)
    assert len(alone) == 6 * 3
    assert len({tuple(numbers) for numbers in alone.values()}) == len(alone)
    for replicas in (2, 3):
        assert drawn(stream, replicas, **options) == alone
    seed_all(key(1, 2, -1 - 4, 2))
    assert alone[4, 2] == draw(), "the seed that the guarantee states"
    assert drawn(stream, 1, **options | {"epoch": 3})[0, 0] != alone[0, 0]


def test_workers_draw_the_same() -> None:
    options = {"collate_fn": collate, "seed": 1}
    assert drawn(False, 1, num_workers=2, **options) == drawn(False, 1, **options)
