import json
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lockstep.data.loader import Batches
from lockstep.data.samplers import draw_batches, draw_indices, validate_sampler
from lockstep.kernel.errors import DatasetError


class Mixed:
    """Draws from all three generators, and knows of epochs."""

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


@pytest.mark.parametrize(("draw", "indices"), [(draw_indices, [0, 1]), (draw_batches, [[0], [1]])])
def test_a_generator_that_is_used_up_is_explained(draw: Any, indices: list[Any]) -> None:
    """As the sampler of the second epoch it yielded nothing, without a reason."""
    sampler = (index for index in indices)
    sizes = [1] if draw is draw_indices else []
    draw(sampler, *sizes, 0, 0)
    with pytest.raises(DatasetError, match=r"sampler generator yielded no .* a generator can be r"):
        draw(sampler, *sizes, 0, 1)


def test_a_sampler_of_one_ranks_part_is_refused() -> None:
    part = DistributedSampler(range(8), num_replicas=2, rank=0)
    inner = BatchSampler(part, 2, drop_last=False)
    for sampler in (part, inner, BatchSampler(inner, 1, drop_last=False)):  # type: ignore[arg-type]
        with pytest.raises(
            DatasetError, match="DistributedSampler yields a different part on each rank"
        ):
            validate_sampler(sampler)
    validate_sampler(DistributedSampler(range(8), num_replicas=1, rank=0))


@pytest.mark.parametrize(
    "generator",
    [torch.Generator(), numpy.random.default_rng(1), numpy.random.RandomState(1), random.Random(1)],
    ids=lambda generator: type(generator).__name__,
)
def test_a_sampler_with_a_generator_of_its_own_is_refused(generator: Any) -> None:
    sampler = RandomSampler(range(8), generator=generator)
    for given in (sampler, BatchSampler(sampler, 2, drop_last=False)):
        with pytest.raises(
            DatasetError, match=r"RandomSampler has a random generator .*\(generator"
        ):
            validate_sampler(given)
    validate_sampler(RandomSampler(range(8), generator=torch.default_generator))


class Counting:
    """A sampler whose order depends on how often it was drawn."""

    count = 0

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        yield from random.Random(self.count).sample(range(40), 40)


def test_an_order_that_depends_on_earlier_draws_is_refused() -> None:
    refused = "yields another order when epoch 0 is drawn again"
    with pytest.raises(DatasetError, match=f"Counting {refused}"):
        draw_indices(Counting(), 2, seed=0, epoch=0)
    with pytest.raises(DatasetError, match=f"BatchSampler {refused}"):
        draw_batches(BatchSampler(Counting(), 2, drop_last=False), seed=0, epoch=0)
    assert draw_indices(iter([3, 1]), 2, 0, 0).indices.tolist() == [3, 1]  # cannot be drawn again


DATA = TensorDataset(torch.arange(40))


def saved_state(batches: Batches) -> Any:
    """Return the state after three batches, as it is read from a file."""
    for number, _ in enumerate(batches, start=1):
        if number == 3:
            break
    return json.loads(json.dumps(batches.state_dict()))


def test_an_order_that_cannot_be_drawn_again_is_an_error() -> None:
    state = saved_state(Batches(DATA, 6, epoch=1, sampler=[*range(40)]))
    resumed = Batches(DATA, 6, epoch=1, sampler=[*range(39, -1, -1)])
    resumed.load_state_dict(state)
    with pytest.raises(
        DatasetError, match=r"order of epoch 1 differs .* batch 3: the sampler list, which"
    ):
        list(resumed)


def test_a_rank_whose_order_is_another_one_tells_the_others() -> None:
    sent: list[bytes] = []

    def agree(data: bytes, doing: str) -> list[bytes]:
        sent.append(data)
        return sent

    resumed = Batches(DATA, 6, agree=agree)
    resumed.load_state_dict(saved_state(Batches(DATA, 6)) | {"order": "0" * 32})
    with pytest.raises(DatasetError, match="the dataset or the version of torch has changed"):
        list(resumed)
    assert len(sent) == 1
