import random
from collections.abc import Iterator

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)

from lockstep.data.samplers import KnownSamplers, draw_batches, draw_indices, validate_sampler
from lockstep.kernel.errors import DatasetError


class Mixed:
    """SamplerStates from all three generators, and knows of epochs."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield self.epoch
        yield int(torch.randint(1000, ()))
        yield random.randrange(1000)
        yield int(numpy.random.randint(1000))


def test_a_sampler_is_drawn_alike_everywhere_and_anew_each_epoch() -> None:
    torch.rand(3)
    first = draw_indices(Mixed(), 2, seed=1, epoch=0)
    torch.rand(5)
    random.random()
    again = draw_indices(Mixed(), 2, seed=1, epoch=0)
    later = draw_indices(Mixed(), 2, seed=1, epoch=1)
    assert first.indices.tolist() == again.indices.tolist()
    assert later.indices[0] == 1
    assert first.indices.tolist()[1:] != later.indices.tolist()[1:]


def test_drawing_leaves_the_users_generators_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    draw_indices(RandomSampler(range(10)), 2, seed=0, epoch=0)
    assert torch.rand(()) == expected


def test_a_weighted_sampler_counts_its_repeats() -> None:
    epoch = draw_indices(WeightedRandomSampler([0.1, 0.9], 20), 4, seed=0, epoch=0)
    assert len(epoch) == 5
    assert epoch.repeats is not None
    assert int(epoch.repeats.max()) > 0


def test_a_batch_sampler_gives_whole_batches() -> None:
    sampler = Mixed()
    epoch = draw_batches(BatchSampler(sampler, 3, drop_last=False), seed=0, epoch=6)
    assert [len(epoch.span(batch)) for batch in range(len(epoch))] == [3, 1]
    assert epoch.indices[0] == 6


def test_what_is_no_index_is_named() -> None:
    with pytest.raises(DatasetError, match="yielded 'a'"):
        draw_indices(["a"], 2, 0, 0)  # type: ignore[list-item]


def test_indices_of_other_libraries_are_whole_numbers_too() -> None:
    indices = [numpy.int64(3), torch.tensor(4)]
    assert draw_indices(indices, 2, 0, 0).indices.tolist() == [3, 4]  # type: ignore[arg-type]


def test_empty_samplers_are_named() -> None:
    with pytest.raises(DatasetError, match="sampler list yielded no sample"):
        draw_indices([], 2, 0, 0)
    with pytest.raises(DatasetError, match="batch sampler list yielded no batch"):
        draw_batches([], 0, 0)


def test_a_sampler_of_one_ranks_part_is_refused() -> None:
    part = DistributedSampler(range(8), num_replicas=2, rank=0)
    inner = BatchSampler(part, 2, drop_last=False)
    for sampler in (part, inner, BatchSampler(inner, 1, drop_last=False)):  # type: ignore[arg-type]
        with pytest.raises(
            DatasetError, match="DistributedSampler yields a different part on each rank"
        ):
            validate_sampler(sampler)
    validate_sampler(DistributedSampler(range(8), num_replicas=1, rank=0))


class Counting:
    """A sampler with a private generator."""

    def __init__(self, seed, generator=None):
        self.generator = generator or torch.Generator().manual_seed(seed)

    def __iter__(self):
        return iter(torch.randperm(9, generator=self.generator).tolist())


def test_samplers_are_restored_by_the_order_of_their_first_use():
    known, first, second = KnownSamplers(), Counting(1), Counting(2)
    for sampler in (first, None, range(9), second, first):
        known.use(sampler)
    list(first), list(second), list(first)
    state = known.state_dict()
    expected = [list(first), list(second)]
    again = KnownSamplers()
    again.load_state_dict(state)
    others = [Counting(7), Counting(8), Counting(9)]
    again.use(others[0])
    assert again.state_dict() == state  # also before the second one is used
    for sampler in (range(9), others[1], others[0], others[2]):
        again.use(sampler)
    assert [list(each) for each in others] == [*expected, list(Counting(9))]


def test_a_generator_that_samplers_share_continues():
    """A sampler per epoch, with one generator; those that no longer exist are not saved."""
    generator, known = torch.Generator().manual_seed(1), KnownSamplers()
    for _ in range(3):
        sampler = Counting(0, generator)
        known.use(sampler)
        list(sampler)
    state = known.state_dict()
    assert list(state) == [2]
    expected = list(sampler)
    other, again = torch.Generator().manual_seed(5), KnownSamplers()
    again.load_state_dict(state)
    for _ in range(3):
        sampler = Counting(0, other)
        again.use(sampler)
    assert list(sampler) == expected
