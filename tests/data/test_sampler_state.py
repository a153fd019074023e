"""Resuming an epoch, or the one after it, with samplers that have generators of their own."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset, WeightedRandomSampler

from lockstep.data.loader import Batches
from lockstep.data.samplers import SamplerStates
from lockstep.kernel.errors import DatasetError

DATA = TensorDataset(torch.arange(40))


class Own:
    """A sampler of the user's own."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        yield from map(int, numpy.argsort([self.rng.random() for _ in range(40)]))


class Stateful:
    """A sampler that knows how to save its state."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        yield from random.Random(self.count).sample(range(40), 40)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Counting(Stateful):
    """One that does not."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


SAMPLERS = {
    "random": lambda: RandomSampler(DATA, generator=generator()),
    "weighted": lambda: WeightedRandomSampler([1.0] * 40, 40, generator=generator()),
    "numpy": lambda: Own(numpy.random.default_rng(5)),
    "python": lambda: Own(random.Random(5)),
    "stateful": Stateful,
}
BATCH_SAMPLERS = {
    "batches": lambda: BatchSampler(RandomSampler(DATA, generator=generator()), 6, False),
    "batches of batches": lambda: BatchSampler(Own(random.Random(5)), 6, False),
}


def options(name: str) -> dict[str, Any]:
    """Return what makes the batches of a training that begins anew."""
    if name in BATCH_SAMPLERS:
        return {"batch_sampler": BATCH_SAMPLERS[name](), "sampler_states": SamplerStates()}
    return {"batch_size": 6, "sampler": SAMPLERS[name](), "sampler_states": SamplerStates()}


def values(batches: Batches, stop: int | None = None) -> list[int]:
    taken: list[int] = []
    for number, batch in enumerate(batches if stop != 0 else (), start=1):
        for microbatch in batch.microbatches:
            taken += microbatch.data[0].tolist()
        if number == stop:
            break
    return taken


def saved(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("name", [*SAMPLERS, *BATCH_SAMPLERS])
@pytest.mark.parametrize("stop", [0, 3, None])
def test_a_resumed_epoch_and_those_after_it_have_the_same_order(name: str, stop: int) -> None:
    """The state held no word of the order, so another one was taken silently."""
    given = options(name)
    whole = [values(Batches(DATA, epoch=epoch, **given)) for epoch in range(4)]
    given = options(name)
    assert values(Batches(DATA, epoch=0, **given)) == whole[0]
    broken = Batches(DATA, epoch=1, **given)
    begun = values(broken, stop)
    state = saved(broken.state_dict())
    assert state["position"] == (7 if stop is None else stop)
    given = options(name)
    resumed = Batches(DATA, epoch=1, **given)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert begun + values(resumed) == whole[1]
    assert [values(Batches(DATA, epoch=epoch, **given)) for epoch in (2, 3)] == whole[2:]


@pytest.mark.parametrize("name", [*SAMPLERS, *BATCH_SAMPLERS])
@pytest.mark.parametrize("first", [1, 2])
def test_a_training_goes_on_in_the_same_order_without_the_state_of_its_batches(
    name: str, first: int
) -> None:
    """Saved in epoch 1, it begins that epoch again, or the next one."""
    given = options(name)
    whole = [values(Batches(DATA, epoch=epoch, **given)) for epoch in range(5)]
    given = options(name)
    for epoch in range(2):
        values(Batches(DATA, epoch=epoch, **given))
    state = saved(given["sampler_states"].state_dict())
    given = options(name)
    given["sampler_states"].load_state_dict(state)
    found = [values(Batches(DATA, epoch=epoch, **given)) for epoch in range(first, 5)]
    assert found == whole[first:]


def test_two_samplers_of_one_epoch_are_told_apart() -> None:
    def both(draws: SamplerStates) -> list[Any]:
        return [
            (RandomSampler(DATA, generator=torch.Generator().manual_seed(seed)), draws)
            for seed in (1, 2)
        ]

    def epoch_of(samplers: list[Any], epoch: int) -> list[list[int]]:
        return [
            values(Batches(DATA, 6, epoch=epoch, sampler=each, sampler_states=draws))
            for each, draws in samplers
        ]

    draws = SamplerStates()
    samplers = both(draws)
    whole = [epoch_of(samplers, epoch) for epoch in range(2)]
    state = saved(draws.state_dict())
    second = values(Batches(DATA, 6, epoch=2, sampler=samplers[0][0], sampler_states=draws))
    middle = saved(draws.state_dict())  # the other one has not drawn in epoch 2 yet
    expected = [
        second,
        values(Batches(DATA, 6, epoch=2, sampler=samplers[1][0], sampler_states=draws)),
    ]
    for from_here, first, then in (
        (state, 1, whole[1]),
        (state, 2, expected),
        (middle, 2, expected),
    ):
        fresh = SamplerStates()
        fresh.load_state_dict(from_here)
        assert saved(fresh.state_dict()) == from_here
        assert epoch_of(both(fresh), first) == then


def test_an_order_that_cannot_be_drawn_again_is_an_error() -> None:
    sampler = Counting()
    values(Batches(DATA, 6, epoch=0, sampler=sampler))
    broken = Batches(DATA, 6, epoch=1, sampler=sampler)
    values(broken, 3)
    resumed = Batches(DATA, 6, epoch=1, sampler=Counting())
    resumed.load_state_dict(saved(broken.state_dict()))
    with pytest.raises(
        DatasetError, match=r"order of epoch 1 differs .* batch 3.* the sampler Counting has"
    ):
        values(resumed)


def test_another_order_of_the_dataset_itself_is_an_error() -> None:
    state = Batches(DATA, 6).state_dict() | {"position": 2, "order": "0" * 32}
    resumed = Batches(DATA, 6)
    resumed.load_state_dict(state)
    with pytest.raises(DatasetError, match="the dataset or the version of torch has changed"):
        values(resumed)


def test_a_rank_whose_order_is_another_one_tells_the_others() -> None:
    sent: list[bytes] = []

    def agree(data: bytes, doing: str) -> list[bytes]:
        sent.append(data)
        return sent

    state = Batches(DATA, 6).state_dict() | {"position": 2, "order": "0" * 32}
    resumed = Batches(DATA, 6, agree=agree)
    resumed.load_state_dict(state)
    with pytest.raises(DatasetError):
        values(resumed)
    assert len(sent) == 1


def test_a_later_epoch_than_the_next_cannot_be_resumed() -> None:
    given = options("random")
    values(Batches(DATA, epoch=1, **given))
    state = saved(given["sampler_states"].state_dict())
    given = options("random")
    given["sampler_states"].load_state_dict(state)
    with pytest.raises(DatasetError, match="saved in epoch 1 and is unknown for epoch 4: continue"):
        values(Batches(DATA, epoch=4, **given))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Own(random.Random(1)), "had the generators generator, but Own has the generators rng"),
        (
            RandomSampler(DATA, generator=numpy.random.default_rng(1)),  # type: ignore[arg-type]
            "the saved state does not fit the sampler RandomSampler",
        ),
    ],
)
def test_the_state_of_another_sampler_is_an_error(other: Any, words: str) -> None:
    given = options("random")
    values(Batches(DATA, epoch=1, **given))
    draws = SamplerStates()
    draws.load_state_dict(saved(given["sampler_states"].state_dict()))
    with pytest.raises(DatasetError, match=words):
        values(Batches(DATA, 6, epoch=2, sampler=other, sampler_states=draws))


def test_samplers_that_depend_on_the_epoch_alone_leave_no_state() -> None:
    draws = SamplerStates()
    sampler = RandomSampler(DATA)
    batches = Batches(DATA, 6, sampler=sampler, sampler_states=draws)
    values(batches)
    assert batches.state_dict()["sampler"] == {}
    assert draws.state_dict() == []
