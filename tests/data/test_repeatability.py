"""A few samples of each epoch are loaded twice: what is not seeded shows."""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from lockstep.data import repeatability
from lockstep.data.loader import Batches
from lockstep.data.repeatability import check_samples, select_positions
from lockstep.kernel.errors import DatasetError, DisagreementError, SampleError
from lockstep.kernel.seeds import key


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index))


class OwnNumpy(Numbers):
    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + torch.from_numpy(self.rng.normal(size=3))


class OwnTorch(Numbers):
    def __init__(self) -> None:
        self.augment = {"noise": [torch.Generator().manual_seed(0)]}

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3, generator=self.augment["noise"][0])


class OwnRarely(Numbers):
    """Its generator changes almost no sample, but is advanced by each."""

    def __init__(self) -> None:
        self.augment = {"noise": [torch.Generator().manual_seed(0)]}

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand((), generator=self.augment["noise"][0])
        return super().__getitem__(index) + (drawn > 0.9999)


class Hidden(Numbers):
    """Its generator is in no attribute."""

    def __getitem__(self, index: int) -> Any:
        return {"x": numpy.random.default_rng().normal(size=3), "path": "a"}


class Counting(Numbers):
    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return super().__getitem__(index) + self.calls


class Spoiling(Numbers):
    """Augments in place what it holds."""

    def __init__(self) -> None:
        self.x = torch.ones(40, 3)

    def __getitem__(self, index: int) -> Any:
        return self.x[index].mul_(1 + torch.rand(()))


OTHER = "gives different results, because it depends on something that is not seeded"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("dataset", [OwnNumpy, OwnTorch, Hidden, Counting, Spoiling])
def test_a_dataset_that_depends_on_what_was_loaded_before_is_named(
    dataset: Any, num_workers: int
) -> None:
    """Its samples depended on the number of ranks."""
    batches = Batches(dataset(), 8, num_workers=num_workers, rank=3, shuffle=False)
    with pytest.raises(
        DatasetError,
        match=rf"sample 0 of {dataset.__name__}, loaded twice with the same random seed, {OTHER}"
        r".*: draw from torch's, Python's or numpy's global generators.* \(rank 3, batch 0\)$",
    ):
        list(batches)


def test_a_private_generator_that_changes_few_samples_is_noticed() -> None:
    with pytest.raises(DatasetError, match=r"^sample 0 of OwnRarely.*draws from a private gener"):
        list(Batches(OwnRarely(), 8, shuffle=False))


class Seeded(Numbers):
    """Generators of its own, as they should be: seeded by a draw from a global one."""

    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(0)
        self.generator = torch.Generator()

    def __getitem__(self, index: int) -> Any:
        self.rng = numpy.random.default_rng(random.getrandbits(64))
        self.generator.manual_seed(int(torch.randint(2**31, ())))
        noise = torch.rand(3, generator=self.generator) + torch.from_numpy(self.rng.random(3))
        return noise + numpy.random.rand(), float("nan"), {"object": object()}


class Split(Numbers):
    """A generator that is used in the beginning only; calls are counted, and cached."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.order = self.rng.sample(range(40), 40)
        self.calls = 0
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.cache.setdefault(index, torch.tensor(self.order[index]))


@pytest.mark.parametrize("dataset", [Seeded, Split, lambda: Subset(Numbers(), range(7))])
def test_datasets_that_are_seeded_pass(dataset: Any) -> None:
    for epoch in range(3):
        collate = len if dataset is Seeded else None
        batches = list(Batches(dataset(), 8, epoch=epoch, collate_fn=collate))
        assert sum(batch.size for batch in batches) == len(dataset())


def test_a_sample_that_raises_is_reported_in_its_turn() -> None:
    class Late(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 4:
                raise ValueError("damaged")
            return super().__getitem__(index)

    batches = Batches(Late(), 8, shuffle=False, microbatches=8, replicas=2, replica=0)
    assert sum(len(batch.microbatches) for batch in batches) == 20
    with pytest.raises(SampleError, match="sample 4 of Late raised ValueError: damaged"):
        list(Batches(Late(), 8, shuffle=False, microbatches=8, replicas=2, replica=1))


def test_samples_that_load_slowly_cost_one_sample_twice() -> None:
    loaded: list[int] = []

    def load(position: int) -> int:
        loaded.append(position)
        until = time.perf_counter() + repeatability.BUDGET
        while time.perf_counter() < until:
            pass
        return position

    assert len(check_samples(load, [5, 6, 7], [50, 60, 70], None)) == 1
    assert loaded == [5, 5]


def test_the_samples_are_spread_over_the_batch() -> None:
    assert select_positions(range(100, 140)) == [100, 120, 110, 130]
    assert select_positions(range(3)) == [0, 1, 2]
    assert select_positions(range(7, 8)) == [7]


def test_a_dataset_that_is_spoiled_after_its_first_epoch_is_named() -> None:
    class Changing(OwnNumpy):
        draws = False

        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) if self.draws else torch.ones(3)

    dataset = Changing()
    list(Batches(dataset, 8))
    dataset.draws = True
    with pytest.raises(DatasetError, match=rf"of Changing, loaded twice .*{OTHER}"):
        list(Batches(dataset, 8, epoch=1))


class Late(Numbers):
    """Begins to count its calls when it has loaded some samples."""

    def __init__(self) -> None:
        self.calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return torch.ones(3) + (self.calls if self.calls > 20 else 0)


class LateCollate(Late):
    """Does the same when samples are collated."""

    def __getitem__(self, index: int) -> Any:
        return torch.ones(3)

    def collate(self, samples: list[Any]) -> Any:
        return torch.stack(samples) + super().__getitem__(0)


@pytest.mark.parametrize("make", [Late, LateCollate])
def test_what_begins_later_is_found_in_a_later_batch(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(repeatability, "EVERY", 3)
    monkeypatch.setattr(repeatability, "BUDGET", 60.0)
    collate = {"collate_fn": (dataset := make()).collate} if make is LateCollate else {}
    dataset = dataset if collate else make()
    batches = Batches(dataset, 4, shuffle=False, **collate)
    with pytest.raises(DatasetError, match=rf"{OTHER}.* \(replica 0, batch [36]\)$"):
        list(batches)


def test_a_resumed_epoch_is_probed_where_it_begins() -> None:
    batches = Batches(OwnNumpy(), 8, shuffle=False)
    batches.load_state_dict({**Batches(Numbers(), 8, shuffle=False).state_dict(), "position": 3})
    with pytest.raises(DatasetError, match=r"^sample 24 of OwnNumpy.*batch 3\)$"):
        list(batches)


class Mixing:
    """Mixes samples by a generator of its own."""

    def __init__(self, seeded: bool) -> None:
        self.rng = numpy.random.default_rng(0)
        self.seeded = seeded

    def __call__(self, samples: list[Any]) -> Any:
        if self.seeded:
            self.rng = numpy.random.default_rng(numpy.random.randint(2**31))
        return torch.stack(samples) * self.rng.random()


def test_a_collate_fn_with_a_generator_of_its_own_is_named() -> None:
    with pytest.raises(DatasetError, match=rf"^collate_fn, called twice .* {OTHER}"):
        list(Batches(Numbers(), 8, collate_fn=Mixing(seeded=False)))
    assert len(list(Batches(Numbers(), 8, collate_fn=Mixing(seeded=True)))) == 5


# --- other data on another rank -----------------------------------------------------------------


def count_calls() -> Callable[[list[Any]], Any]:
    calls = itertools.count()
    return lambda samples: torch.tensor(samples) + next(calls)


def pad_to_longest_so_far() -> Callable[[list[Any]], Any]:
    longest = [0]

    def collate(samples: list[int]) -> torch.Tensor:
        longest[0] = max(longest[0], *samples)
        return torch.zeros(len(samples), longest[0])

    return collate


def spoil(samples: list[list[int]]) -> list[int]:
    """Writes into the samples, which belong to the dataset."""
    for sample in samples:
        sample[0] += 1
    return [sample[0] for sample in samples]


@pytest.mark.parametrize("is_stream", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "collate",
    [count_calls, pad_to_longest_so_far],
    ids=lambda each: each.__name__,
)
def test_a_collate_fn_that_is_not_repeatable_is_named(
    collate: Callable[[], Any], workers: int, is_stream: bool
) -> None:
    dataset: Any = iter(range(32)) if is_stream else list(range(32))
    with pytest.raises(DatasetError, match=r"^collate_fn, called twice with the same random seed"):
        list(Batches(dataset, 8, shuffle=False, num_workers=workers, collate_fn=collate()))


def test_a_collate_fn_that_writes_into_the_dataset_is_named() -> None:
    with pytest.raises(DatasetError, match=r"^collate_fn, called twice"):
        list(Batches([[each] for each in range(32)], 8, collate_fn=spoil))
    fresh = [[each] for each in range(32)]
    assert len(list(Batches(iter(fresh), 8, collate_fn=spoil))) == 4, "a stream gives new samples"


@pytest.mark.parametrize("is_stream", [False, True], ids=["map", "stream"])
def test_a_collate_fn_is_called_once_more_for_one_micro_batch(is_stream: bool) -> None:
    calls = []

    def collate(samples: list[Any]) -> torch.Tensor:
        calls.append(samples)
        return torch.tensor(samples) + torch.rand(())

    dataset: Any = iter(range(32)) if is_stream else list(range(32))
    assert len(list(Batches(dataset, 8, microbatches=2, collate_fn=collate))) == 4
    assert len(calls) == 1 + 8
    assert calls[2] == calls[0]


class Said:
    """Stands for two ranks, of which the other one has said what it said alone."""

    def __init__(self) -> None:
        self.messages: dict[str, bytes] = {}

    def first(self, message: bytes, doing: str) -> list[bytes]:
        self.messages[doing] = message
        return [message]

    def second(self, message: bytes, doing: str) -> list[bytes]:
        return [self.messages[doing], message]


class Shifted(Numbers):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + (index >= 20)


class IterableSource(IterableDataset[Any]):
    def __init__(self, shift: float) -> None:
        self.shift = shift

    def __iter__(self) -> Iterator[Any]:
        for number in range(40):
            yield torch.tensor(number + self.shift)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("ours", "theirs", "options", "sample"),
    [
        (Numbers(), Shifted(), {"shuffle": False, "start": 3}, 24),
        (Numbers(), Shifted(), {"sampler": [1, 2, 3, 4, 20, 5, 6, 7]}, 20),
        (
            TensorDataset(torch.arange(40)),
            TensorDataset(torch.arange(40) * 2),
            {"sampler": range(3, 40)},
            3,
        ),
        (
            Subset(TensorDataset(torch.arange(40)), range(10, 20)),
            Subset(TensorDataset(torch.arange(40)), range(20, 30)),
            {"sampler": range(3, 9)},
            3,
        ),
        (IterableSource(0), IterableSource(1), {}, 0),
        (IterableSource(0), IterableSource(1), {"start": 2}, 16),
    ],
)
def test_a_rank_with_other_samples_is_named(
    ours: Any,
    theirs: Any,
    options: dict[str, Any],
    sample: int,
    num_workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Datasets of equal length passed for the same."""
    monkeypatch.setattr(repeatability, "BUDGET", 60.0)  # all samples, also on a busy machine
    given = dict(options)
    start = given.pop("start", 0)
    ranks = Said()

    def batches(dataset: Any, agree: Any) -> Batches:
        result = Batches(dataset, 8, agree=agree, num_workers=num_workers, **given)
        if start:
            result.load_state_dict({**result.state_dict(), "position": start})
        return result

    list(batches(ours, ranks.first))
    list(batches(ours, ranks.second))
    with pytest.raises(
        DisagreementError, match=rf"sample {sample} of rank 1 differs from that of rank 0, although"
    ):
        list(batches(theirs, ranks.second))


def test_a_rank_that_cannot_load_its_first_batch_tells_the_others() -> None:
    class Damaged(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("damaged")

    ranks = Said()
    with pytest.raises(SampleError, match="damaged"):
        list(Batches(Damaged(), 8, agree=ranks.first))
    assert json.loads(ranks.messages["comparing samples of"]) == []
    list(Batches(Numbers(), 8, agree=ranks.second))


def test_a_loader_that_fails_at_once_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise SampleError("no worker")
        yield

    monkeypatch.setattr("lockstep.data.loader.load_in_workers", fail)
    ranks = Said()
    with pytest.raises(SampleError, match="no worker"):
        list(Batches(Numbers(), 8, num_workers=1, agree=ranks.first))
    assert json.loads(ranks.messages["comparing samples of"]) == []


def test_samples_of_the_check_are_loaded_once_more_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeatability, "BUDGET", 60.0)  # all samples, also on a busy machine

    class Counting(Dataset[Any]):
        loads = 0

        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            Counting.loads += 1
            return torch.rand(3) + index

    batches = list(Batches(Counting(), 16, microbatches=4, shuffle=False))
    assert Counting.loads == 32 + 4
    torch.default_generator.manual_seed(key(0, 0, 8))  # one of those that are checked
    assert torch.equal(batches[0].microbatches[2].data[0], torch.rand(3) + 8)
