import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.dataset_partition import partition_sizes
from lockstep.data.epoch_order import EpochOrder, epoch_permutation
from lockstep.kernel.errors import DatasetError
from lockstep.kernel.seeds import key

weights = st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(
    lambda parts: sum(parts) > 0
)


@given(st.integers(0, 10_000), weights)
def test_partition_sizes_lose_nothing_and_round_each_quota(total: int, parts: list[int]) -> None:
    fractions = [part / sum(parts) for part in parts]
    sizes = partition_sizes(total, fractions)
    assert sum(sizes) == total
    for size, fraction in zip(sizes, fractions, strict=True):
        assert math.floor(total * fraction - 1e-6) <= size <= math.ceil(total * fraction + 1e-6)


@pytest.mark.parametrize(
    ("fractions", "words"),
    [
        ([], "without fractions"),
        ([1.5, -0.5], "by -0.5"),
        ([float("nan"), 1.0], "by nan"),
        ([float("inf")], "by inf"),
        ([0.5, 0.4], "sum to 0.9, not to 1"),
        ([0.5, 0.50001], "sum to 1.00001, not to 1"),
    ],
)
def test_bad_fractions_are_refused(fractions: list[float], words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        partition_sizes(10, fractions)


@given(st.integers(0, 300), st.integers(0, 2**31), st.integers(0, 1000))
def test_the_order_is_a_permutation_fixed_by_seed_and_epoch(n: int, seed: int, epoch: int) -> None:
    indices = epoch_permutation(n, seed, epoch)
    assert sorted(indices.tolist()) == list(range(n))
    assert torch.equal(indices, epoch_permutation(n, seed, epoch))


def test_the_order_is_the_documented_one() -> None:
    generator = torch.Generator().manual_seed(key(1234, 5))
    assert torch.equal(epoch_permutation(100, 1234, 5), torch.randperm(100, generator=generator))


def test_the_order_leaves_the_global_generator_alone() -> None:
    before = torch.default_generator.get_state()
    epoch_permutation(50, 0, 0)
    assert torch.equal(before, torch.default_generator.get_state())


@given(st.integers(1, 100), st.integers(1, 40))
def test_uniform_batches_cover_the_order_and_only_the_last_is_short(n: int, size: int) -> None:
    epoch = EpochOrder.from_indices(torch.arange(n), size)
    spans = [epoch.span(batch) for batch in range(len(epoch))]
    assert [position for span in spans for position in span] == list(range(n))
    assert all(len(span) == size for span in spans[:-1])
    assert 1 <= len(spans[-1]) <= size


def test_grouped_batches_stay_as_they_are() -> None:
    epoch = EpochOrder.from_batches([[4, 2], [7], [1, 0, 3]])
    batches = [epoch.indices[epoch.span(b).start : epoch.span(b).stop].tolist() for b in range(3)]
    assert batches == [[4, 2], [7], [1, 0, 3]]
    assert epoch.repeats is None


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(DatasetError, match="batch 1 of the batch sampler is empty"):
        EpochOrder.from_batches([[1], []])


def test_repeated_draws_are_counted() -> None:
    epoch = EpochOrder.from_indices(torch.tensor([3, 1, 3, 3, 1, 0]), 2).with_repeats()
    assert epoch.repeats is not None
    assert epoch.repeats.tolist() == [0, 0, 1, 2, 1, 0]


def test_the_digest_sees_the_order_and_the_batches() -> None:
    epochs = [
        EpochOrder.from_indices(torch.arange(6), 2),
        EpochOrder.from_indices(torch.arange(6), 3),
        EpochOrder.from_indices(torch.arange(6).flip(0), 2),
        EpochOrder.from_batches([[0, 1, 2], [3, 4], [5]]),
    ]
    assert len({epoch.digest() for epoch in epochs}) == len(epochs)
    assert EpochOrder.from_batches([[0, 1], [2, 3], [4, 5]]).digest() == epochs[0].digest()
