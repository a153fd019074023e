import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from lockstep.data.loader import Batches
from lockstep.kernel.errors import DatasetError, SampleError

# Three workers on two cores are meant here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")


class Stream(IterableDataset[Any]):
    """Sample i is (i, a draw)."""

    def __init__(self, length: int, fails_at: int = -1) -> None:
        self.length = length
        self.fails_at = fails_at

    def indices(self) -> range:
        return range(self.length)

    def __iter__(self) -> Iterator[Any]:
        for index in self.indices():
            if index == self.fails_at:
                raise ValueError("the line is torn")
            yield torch.tensor([index, torch.rand(()).item()], dtype=torch.float64)


class SelfSharding(Stream):
    """Gives each of torch's workers a part, as torch's own documentation teaches."""

    def indices(self) -> range:
        info = get_worker_info()
        return range(self.length) if info is None else range(info.id, self.length, info.num_workers)


def at_width(replicas: int, dataset: Any, **options: Any) -> torch.Tensor:
    parts = [
        list(Batches(dataset, 8, replicas=replicas, replica=replica, **options))
        for replica in range(replicas)
    ]
    held = []
    for batches in zip(*parts, strict=True):
        microbatches = [part for batch in batches for part in batch.microbatches]
        assert [part.index for part in microbatches] == list(range(batches[0].leaves))
        held += [part.data for part in microbatches]
    return torch.cat(held)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Stream, SelfSharding])
def test_a_stream_is_cut_by_position(kind: type[Stream], num_workers: int) -> None:
    alone = at_width(1, Stream(43), seed=1, epoch=2)
    assert alone[:, 0].tolist() == list(range(43))
    assert len(alone[:, 1].unique()) == 43
    for replicas in (1, 3):
        options = {"seed": 1, "epoch": 2, "num_workers": num_workers}
        assert torch.equal(at_width(replicas, kind(43), **options), alone)


@pytest.mark.parametrize("length", [8, 17])
def test_workers_beyond_the_end_of_the_stream_change_nothing(length: int) -> None:
    assert torch.equal(at_width(1, Stream(length), num_workers=3), at_width(1, Stream(length)))


def test_a_stream_changes_with_the_epoch() -> None:
    one, other = (at_width(1, Stream(9), epoch=epoch) for epoch in (0, 1))
    assert not torch.equal(one[:, 1], other[:, 1])


def test_what_a_stream_draws_at_its_beginning_is_the_same_everywhere() -> None:
    class Shuffled(IterableDataset[Any]):
        """Draws its order before its first sample, as a shuffling stream does."""

        def __iter__(self) -> Iterator[Any]:
            return iter([torch.tensor([index]) for index in random.sample(range(20), 20)])

    random.seed(1)
    one = at_width(1, Shuffled())
    random.seed(2)
    assert torch.equal(at_width(2, Shuffled()), one)
    assert not torch.equal(at_width(2, Shuffled(), epoch=1), one)


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("position", [1, 6])
def test_a_stream_is_resumed_by_skipping(position: int, num_workers: int) -> None:
    batches = Batches(Stream(43), 8, num_workers=num_workers)
    state = {**batches.state_dict(), "position": position}
    batches.load_state_dict(state)
    rest = [part.data for batch in batches for part in batch.microbatches]
    whole = at_width(1, Stream(43))[8 * position :]
    assert torch.equal(torch.cat(rest) if rest else whole[:0], whole)


def test_a_generator_is_a_stream() -> None:
    sizes = [batch.size for batch in Batches((x for x in range(10)), 4)]
    assert sizes == [4, 4, 2]


@pytest.mark.parametrize("num_workers", [0, 3])
def test_an_empty_stream_is_named(num_workers: int) -> None:
    with pytest.raises(DatasetError, match="Stream has no samples"):
        list(Batches(Stream(0), 4, num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("fails_at", [0, 16])
def test_a_sample_that_raises_is_named_after_the_good_batches(
    fails_at: int, num_workers: int
) -> None:
    batches = Batches(Stream(43, fails_at), 8, num_workers=num_workers)
    with pytest.raises(SampleError, match=rf"^sample {fails_at} of Stream raised ValueError: the"):
        list(batches)
    assert batches.position == fails_at // 8


def test_a_stream_that_cannot_be_collated_is_named() -> None:
    ragged = (torch.zeros(index % 2 + 1) for index in range(9))
    with pytest.raises(SampleError, match="collating samples 0, 1 of generator"):
        list(Batches(ragged, 4, microbatches=2))


def test_a_stream_with_a_length_counts_its_batches() -> None:
    class Known(Stream):
        def __len__(self) -> int:
            return self.length

    assert len(Batches(Known(17), 8)) == 3
    with pytest.raises(TypeError):
        len(Batches(Stream(17), 8))


def test_loading_a_stream_leaves_the_users_generator_alone() -> None:
    torch.manual_seed(1)
    expected = [torch.rand(()).item() for _ in range(3)]
    torch.manual_seed(1)
    assert [torch.rand(()).item() for _ in Batches(Stream(17), 8)] == expected
