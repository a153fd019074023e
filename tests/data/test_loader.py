import json
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lockstep.data.epoch_order import epoch_permutation
from lockstep.data.loader import Batches
from lockstep.data.microbatch import ALIGNMENT, Batch, map_tensors
from lockstep.kernel.errors import DatasetError, DisagreementError, LayoutError, SampleError
from lockstep.kernel.seeds import key


class Numbers(Dataset[Any]):
    """Sample i is i; nothing is drawn."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


class Augmented(Numbers):
    """Sample i is (i, a draw of torch, of random, of numpy)."""

    def __getitem__(self, index: int) -> Any:
        drawn = [torch.rand(()).item(), random.random(), float(numpy.random.rand())]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Broken(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise ValueError("no such picture\nand much more")
        return torch.zeros(index % 2 + 1)


def flat(batches: list[list[Batch]]) -> list[Any]:
    """Put the replicas' micro-batches together, checking that each comes once, in its place."""
    result = []
    for parts in zip(*batches, strict=True):
        held = [microbatch for part in parts for microbatch in part.microbatches]
        assert [microbatch.index for microbatch in held] == list(range(parts[0].leaves))
        assert sum(microbatch.size for microbatch in held) == parts[0].size
        result.extend(microbatch.data for microbatch in held)
    return result


class Ranks:
    """Stands for ranks that come one after another: each hears those before it."""

    def __init__(self) -> None:
        self.said: dict[str, list[bytes]] = {}

    def __call__(self, message: bytes, doing: str) -> list[bytes]:
        self.said.setdefault(doing, []).append(message)
        return self.said[doing]


def at_width(replicas: int, dataset: Any, batch_size: int | None, **options: Any) -> list[Any]:
    return flat(
        [
            list(Batches(dataset, batch_size, replicas=replicas, replica=replica, **options))
            for replica in range(replicas)
        ]
    )


@given(st.integers(1, 70), st.integers(1, 30), st.integers(1, 9), st.booleans(), st.booleans())
def test_every_width_sees_the_same_order(
    n: int, batch_size: int, microbatches: int, shuffle: bool, in_memory: bool
) -> None:
    dataset = TensorDataset(torch.arange(n)) if in_memory else Numbers(n)
    options = {"seed": 5, "epoch": 3, "shuffle": shuffle, "microbatches": microbatches}
    expected = epoch_permutation(n, 5, 3, shuffle).tolist()
    for replicas in range(1, min(4, microbatches) + 1):
        parts = at_width(replicas, dataset, batch_size, **options)
        values = [part[0] if in_memory else part for part in parts]
        assert torch.cat(values).tolist() == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_depends_on_the_sample_only(num_workers: int) -> None:
    alone = torch.cat(at_width(1, Augmented(37), 16, seed=3, epoch=2))
    for replicas in (2, 3):
        options = {"seed": 3, "epoch": 2, "num_workers": num_workers}
        torch.manual_seed(replicas)
        assert torch.equal(torch.cat(at_width(replicas, Augmented(37), 16, **options)), alone)
    torch.manual_seed(key(3, 2, int(alone[0, 0])))
    assert alone[0, 1] == torch.rand(()).double()


def test_a_sample_drawn_again_has_numbers_of_its_own() -> None:
    drawn = torch.cat(at_width(1, Augmented(4), 4, sampler=[1, 1, 2, 1]))
    assert drawn[:, 0].tolist() == [1, 1, 2, 1]
    assert len(drawn[:, 1].unique()) == 4
    assert torch.equal(drawn, torch.cat(at_width(3, Augmented(4), 4, sampler=[1, 1, 2, 1])))


def test_loading_leaves_the_users_generators_alone() -> None:
    def draws() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(numpy.random.rand())

    def seeded() -> None:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)

    seeded()
    expected = [draws() for _ in range(3)]
    seeded()
    assert [draws() for _ in Batches(Augmented(12), 4)] == expected


def test_tensors_in_memory_have_the_bits_of_collated_samples() -> None:
    whole = TensorDataset(torch.randn(50, 3, 5), torch.arange(50, dtype=torch.int16))
    dataset = Subset(Subset(whole, list(range(49, 9, -1))), list(range(1, 40, 2)))
    quick = at_width(2, dataset, 7, seed=1)
    slow = at_width(2, dataset, 7, seed=1, collate_fn=default_collate)
    assert len(quick) == len(slow)
    for one, other in zip(quick, slow, strict=True):
        assert type(one) is type(other)
        for mine, theirs in zip(one, other, strict=True):
            assert mine.dtype == theirs.dtype
            assert mine.stride() == theirs.stride()
            assert torch.equal(mine, theirs)


def test_a_tensor_dataset_of_ones_own_is_asked() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return 2 * self.tensors[0][index]

    parts = at_width(1, Doubled(torch.arange(6)), 6, shuffle=False)
    assert torch.cat(parts).tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_tensor_is_aligned(num_workers: int) -> None:
    def skewed(samples: list[torch.Tensor]) -> dict[str, Any]:
        values = torch.stack([samples[0], *samples])
        return {"values": values[1:], "more": (values[-1:],)}

    pointers: list[int] = []
    batches = Batches(Numbers(30), 8, collate_fn=skewed, num_workers=num_workers)
    for batch in batches:
        for microbatch in batch.microbatches:
            map_tensors(lambda tensor: pointers.append(tensor.data_ptr()), microbatch.data)
    assert len(pointers) == 2 * (8 + 8 + 8 + 6)
    assert {pointer % ALIGNMENT for pointer in pointers} == {0}


def test_a_sampler_gives_the_order() -> None:
    sampler = WeightedRandomSampler([1.0] * 5 + [9.0] * 5, 23)
    alone = torch.cat(at_width(1, Numbers(10), 8, sampler=sampler, seed=4))
    assert len(alone) == 23
    assert torch.equal(alone, torch.cat(at_width(3, Numbers(10), 8, sampler=sampler, seed=4)))
    assert len(Batches(Numbers(10), 8, sampler=sampler)) == 3


def test_a_batch_sampler_gives_the_batches() -> None:
    groups = [[4, 0], [1, 2, 3, 9, 8], [7]]
    for replicas in (1, 2, 3):
        parts = [
            list(Batches(Numbers(10), batch_sampler=groups, replicas=replicas, replica=replica))
            for replica in range(replicas)
        ]
        assert [batch.size for batch in parts[0]] == [2, 5, 1]
        assert torch.cat(flat(parts)).tolist() == [index for group in groups for index in group]
    assert len(Batches(Numbers(10), batch_sampler=BatchSampler(range(10), 4, False))) == 3


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_state_goes_on_at_another_width(
    n: int, batch_size: int, before: int, after: int, data: st.DataObject
) -> None:
    length = len(Batches(Augmented(n), batch_size))
    stop = data.draw(st.integers(0, length))
    options: dict[str, Any] = {"seed": 2, "epoch": 1}
    begun = []
    state = {}
    for replica in range(before):
        batches = Batches(Augmented(n), batch_size, replicas=before, replica=replica, **options)
        taken = [batch for batch, _ in zip(batches, range(stop), strict=False)] if stop else []
        begun.append(taken[:stop])
        state = json.loads(json.dumps(batches.state_dict()))
    state["position"] = stop
    resumed = []
    for replica in range(after):
        batches = Batches(Augmented(n), batch_size, replicas=after, replica=replica, **options)
        batches.load_state_dict(state)
        assert batches.state_dict() == state
        resumed.append(list(batches))
        assert batches.position == length
    whole = torch.cat(at_width(1, Augmented(n), batch_size, **options))
    assert torch.equal(torch.cat([*flat(begun), *flat(resumed)]), whole)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_position_counts_batches_handed_out_not_prefetched(num_workers: int) -> None:
    batches = Batches(Augmented(40), 4, num_workers=num_workers)
    assert batches.state_dict()["position"] == 0
    for handed_out, _ in enumerate(batches, start=1):
        assert batches.state_dict()["position"] == handed_out
        if handed_out == 3:
            break
    resumed = Batches(Augmented(40), 4)
    resumed.load_state_dict(batches.state_dict())
    assert len(list(resumed)) == 7
    assert len(list(resumed)) == 10  # a second pass is a whole one
    assert resumed.position == 10


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Batches(Numbers(11), 4), "belongs to samples 11, but these batches have 10"),
        (Batches(Numbers(10), 5), "belongs to batch size 5, but these batches have 4"),
        (Batches(Numbers(10), 4, seed=3), "belongs to seed 3, but these batches have 0"),
        (Batches(Numbers(10), 4, epoch=2), "belongs to epoch 2, but these batches have 0"),
        (Batches(Numbers(10), 4, shuffle=False), "belongs to shuffle False"),
        (Batches(Numbers(10), 4, drop_last=True), "belongs to drop last True"),
    ],
)
def test_a_state_of_something_else_is_refused(other: Batches, words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        Batches(Numbers(10), 4).load_state_dict(other.state_dict())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_raises_is_named(num_workers: int) -> None:
    batches = Batches(
        Broken(20), 1, shuffle=False, num_workers=num_workers, replicas=2, replica=0, rank=5
    )
    with pytest.raises(SampleError) as caught:
        list(batches)
    message = str(caught.value)
    assert message.startswith("sample 17 of Broken raised ValueError: no such picture, at test_")
    assert message.endswith(" (rank 5, batch 17)")
    assert "\n" not in message
    assert batches.position == 17


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_cannot_be_collated_are_named(num_workers: int) -> None:
    options = {"shuffle": False, "microbatches": 2, "num_workers": num_workers}
    with pytest.raises(
        SampleError, match=r"^collating samples 0, 1 of Broken .* RuntimeError: stack"
    ):
        list(Batches(Broken(20), 4, **options))
    with pytest.raises(SampleError, match=r"samples 0, 1, 2, 3, 4, 5, 6, 7, \.\.\. of"):
        list(Batches(Broken(17), 17, **options))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dataset": Numbers(0)}, "Numbers is empty"),
        ({"batch_size": 0}, "batch size is 0; it must be an integer from 1"),
        ({"batch_size": 4.0}, "batch size is 4.0; it must be an integer"),
        ({"batch_size": "4"}, "batch size is '4'; it must be an integer"),
        ({"batch_size": None}, "batch size is missing: pass batch_size=, the number of samples"),
        ({"batch_sampler": [[1]]}, "omit batch_size, sampler and drop_last"),
        ({"batch_sampler": [[1]], "batch_size": None, "sampler": [1]}, "omit batch_size, sampler"),
        ({"batch_sampler": [[1]], "batch_size": None, "drop_last": True}, "omit batch_size, sampl"),
        ({"dataset": 7}, "int is not a dataset"),
        ({"dataset": iter([1]), "sampler": [1]}, "iterable datasets cannot take a sampler"),
        ({"num_workers": -1}, "num_workers must not be negative"),
        ({"timeout": 0}, "timeout must be positive"),
        (
            {"sampler": DistributedSampler(range(8), 2, 1)},
            "DistributedSampler yields a different part on each rank",
        ),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        Batches(**{"dataset": Numbers(8), "batch_size": 4, **arguments})


def test_a_map_without_length_is_refused() -> None:
    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(DatasetError, match="Endless has no length; define __len__"):
        Batches(Endless(), 4)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"replicas": 9}, "9 replicas cannot share 8 micro-batches"),
        ({"replicas": 2, "replica": 2}, "replica 2 of 2 does not exist"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: dict[str, int], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Batches(Numbers(8), 4, **layout)


def test_ranks_exchange_what_they_are_about_to_do() -> None:
    agree = Ranks()
    for _ in range(2):
        list(Batches(Numbers(10), 4, seed=1, agree=agree))
    assert len(agree.said["beginning"]) == len(agree.said["comparing samples of"]) == 2
    with pytest.raises(DisagreementError, match="rank 2: number of samples is 9, on rank 0 it is "):
        list(Batches(Numbers(9), 4, seed=1, agree=agree))


def test_a_sampler_of_another_order_is_noticed() -> None:
    agree = Ranks()
    list(Batches(Numbers(10), 4, sampler=range(10), agree=agree))
    with pytest.raises(DisagreementError, match="rank 1 has a different order of the samples"):
        list(Batches(Numbers(10), 4, sampler=range(9, -1, -1), agree=agree))


def test_a_rank_without_an_order_tells_the_others_before_it_fails() -> None:
    class Failing:
        def __iter__(self) -> Iterator[int]:
            raise OSError("weights missing")

    agree = Ranks()
    list(Batches(Numbers(10), 4, agree=agree))
    with pytest.raises(OSError, match="weights missing"):
        list(Batches(Numbers(10), 4, sampler=Failing(), agree=agree))
    with pytest.raises(DisagreementError, match="rank 1 could not determine its order"):
        list(Batches(Numbers(10), 4, agree=agree))


class Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(self.length))


def test_the_short_last_batch_can_be_left_out() -> None:
    for n in (7, 8, 9):
        for dataset in (Numbers(n), TensorDataset(torch.arange(n)), Stream(n)):
            options = {"sampler": list(range(n))[::-1]} if isinstance(dataset, Numbers) else {}
            batches = Batches(dataset, 4, drop_last=True, **options)
            whole = list(Batches(dataset, 4, **options))[: n // 4]
            left = list(batches)
            assert [batch.size for batch in left] == [4] * (n // 4)
            assert [batch.microbatches for batch in left] == [b.microbatches for b in whole]
            assert isinstance(dataset, Stream) or len(batches) == n // 4
            resumed = Batches(dataset, 4, drop_last=True, **options)
            resumed.load_state_dict({**batches.state_dict(), "position": n // 4 - 1})
            assert [batch.size for batch in resumed] == [4]
    older = {**Batches(Numbers(9), 4).state_dict()}
    del older["drop_last"]
    Batches(Numbers(9), 4).load_state_dict(older)


@pytest.mark.parametrize("options", [{}, {"sampler": [0, 1]}])
def test_an_epoch_without_a_whole_batch_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match="drop_last=True leaves no batch of 4 samples"):
        list(Batches(Numbers(3), 4, drop_last=True, **options))
    with pytest.raises(DatasetError, match="the dataset Stream has fewer than 4 samples"):
        list(Batches(Stream(3), 4, drop_last=True))
