"""The batch sampler of `ls.exact`: the same micro-batches for any number of ranks."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, WeightedRandomSampler

from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.data.microbatch_sampler import LoadedHere, MicrobatchSampler, PlannedMicrobatch
from lockstep.kernel.errors import DatasetError, LayoutError

DATA = TensorDataset(torch.arange(23))
LEAVES = 4


class Buckets:
    """A batch sampler whose lists have several sizes, in a random order."""

    lists = ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10], [11, 12], [13, 14, 15, 16])

    def __len__(self) -> int:
        return len(self.lists)

    def __iter__(self) -> Any:
        yield from (self.lists[number] for number in torch.randperm(len(self.lists)).tolist())


class Recorder:
    def __init__(self) -> None:
        self.planned: list[PlannedMicrobatch] = []

    def begin_epoch(self) -> None:
        self.planned.clear()

    def plan(self, microbatch: PlannedMicrobatch) -> None:
        self.planned.append(microbatch)

    def leave(self) -> None:
        self.planned.clear()


def make(ranks: int = 1, rank: int = 0, **options: Any) -> MicrobatchSampler:
    share = ReplicaShare(LEAVES, on_one_host(ranks), rank)
    return MicrobatchSampler(DATA, 8, True, 3, False, share, **options)


def plan(ranks: int, epoch: int, options: Any) -> dict[tuple[int, int], Any]:
    """Return the samples and the plan of each micro-batch of all ranks."""
    found: dict[tuple[int, int], Any] = {}
    for rank in range(ranks):
        sampler = make(ranks, rank, **options())
        recorder = Recorder()
        sampler.attach(recorder)
        sampler.set_epoch(epoch)
        lists = [list(indices) for indices in sampler]
        assert len(sampler) == len(lists)
        for planned, indices in zip(recorder.planned, lists, strict=True):
            assert planned.batches == sampler.batches
            assert planned.size == len(indices)
            assert (planned.batch, planned.number) not in found
            found[planned.batch, planned.number] = indices, planned[2:]
    return found


KINDS = {
    "shuffled": dict,
    "sampler": lambda: {"sampler": WeightedRandomSampler([1.0, 9.0] * 10, 21)},
    "batch sampler": lambda: {"batch_sampler": Buckets()},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_microbatches_do_not_depend_on_the_number_of_ranks(options: Any) -> None:
    for epoch in (0, 1):
        alone = plan(1, epoch, options)
        assert plan(2, epoch, options) == plan(3, epoch, options) == alone
    assert plan(1, 0, options) != alone


def test_the_lists_of_a_batch_sampler_are_kept_and_the_rest_is_split() -> None:
    found = plan(1, 0, KINDS["batch sampler"])
    whole = {batch: [found[key][0] for key in found if key[0] == batch] for batch in (0, 1)}
    assert all(indices in Buckets.lists for indices in whole[0])
    assert len(whole[0]) == LEAVES
    rest = [indices for indices in Buckets.lists if indices not in whole[0]]
    assert sorted(chain(*whole[1])) == sorted(chain(*rest))
    assert len(whole[1]) == LEAVES
    assert {*map(len, whole[1])} <= {1, 2, 3}


def test_a_rest_with_fewer_samples_than_ranks_is_refused() -> None:
    sampler = make(3, 2, batch_sampler=BatchSampler(range(13), 3, drop_last=False))
    with pytest.raises(LayoutError, match=r"fewer samples \(1\) than there are ranks \(3\)"):
        list(sampler)


def test_a_sampler_with_a_generator_of_its_own_is_refused() -> None:
    sampler = WeightedRandomSampler([1.0] * 5, 5, generator=torch.Generator())
    with pytest.raises(DatasetError, match="a random generator of its own"):
        make(sampler=sampler)


def test_repeated_samples_are_loaded_with_other_random_numbers() -> None:
    class Noisy(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(())

    share = ReplicaShare(1, on_one_host(1), 0)
    sampler = MicrobatchSampler(Noisy(), 4, True, 0, False, share, sampler=[0, 1, 0, 1])
    (drawn,) = DataLoader(Noisy(), batch_sampler=sampler)
    assert len({*drawn.tolist()}) == 4


@pytest.mark.parametrize("ends_early", [True, False])
def test_a_micro_batch_that_is_not_trained_leaves_the_generators_as_they_were(
    ends_early: bool,
) -> None:
    """What a loop drew after `break` depended on the rank's micro-batch, and so did the next."""
    sampler = make()
    before = torch.get_rng_state()
    # With a generator of its own, from which torch draws the seed of workers.
    for _ in DataLoader(DATA, batch_sampler=sampler, generator=torch.Generator()):
        torch.rand(3)
        if ends_early:
            break
    assert LoadedHere.restore is None
    assert torch.equal(torch.get_rng_state(), before)
