from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep as ls
from lockstep.kernel.errors import DatasetError

weights = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda parts: sum(parts) > 0)


@given(st.integers(0, 200), weights, st.integers(0, 100))
def test_the_parts_are_disjoint_and_together_the_whole(n: int, parts: list[int], seed: int) -> None:
    dataset = TensorDataset(torch.arange(n))
    subsets = ls.partition(dataset, [part / sum(parts) for part in parts], seed)
    assert len(subsets) == len(parts)
    assert sorted(int(value) for subset in subsets for (value,) in subset) == list(range(n))


def test_the_seed_fixes_the_parts() -> None:
    dataset = TensorDataset(torch.arange(100))
    one, same, other = (ls.partition(dataset, [0.8, 0.2], seed)[1].indices for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert one != sorted(one)


def test_a_dataset_without_length_is_refused() -> None:
    class IterableSource(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(DatasetError, match="IterableSource has no length"):
        ls.partition(IterableSource(), [1.0])
    with pytest.raises(DatasetError, match=r"a DataLoader has batches, .*: pass its dataset"):
        ls.partition(DataLoader(TensorDataset(torch.arange(8)), 4), [1.0])  # type: ignore[arg-type]


def test_bad_fractions_are_refused() -> None:
    with pytest.raises(DatasetError, match="sum to"):
        ls.partition(TensorDataset(torch.arange(4)), [0.5])
