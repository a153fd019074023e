import math
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.data.microbatch import ALIGNMENT, align_tensors, map_tensors, split_batch
from lockstep.kernel.errors import DatasetError, UsageError

WHOLE = {m: ReplicaShare(m, on_one_host(1), 0) for m in (2, 4)}


class Pair(NamedTuple):
    image: Any
    label: Any


def pointers(data: Any) -> list[int]:
    found: list[int] = []
    map_tensors(lambda tensor: found.append(tensor.data_ptr()), data)
    return found


@given(st.integers(1, 60), st.integers(1, 9), st.data())
def test_cut_gives_each_sample_once(n: int, m: int, data: st.DataObject) -> None:
    hosts = on_one_host(data.draw(st.integers(1, m)))
    batch = (torch.arange(n * 3).view(n, 3), torch.arange(n))
    shares = [ReplicaShare(m, hosts, replica) for replica in hosts[0]]
    cuts = [split_batch(batch, share) for share in shares]
    held = [microbatch for part in cuts for microbatch in part.microbatches]
    held.sort(key=lambda each: each.index)
    assert [microbatch.index for microbatch in held] == list(range(min(n, m)))
    assert [microbatch.size for microbatch in held] == [len(x.data[1]) for x in held]
    for position, whole in enumerate(batch):
        assert torch.equal(torch.cat([x.data[position] for x in held]), whole)
    assert {(part.size, part.leaves) for part in cuts} == {(n, min(n, m))}
    assert all(pointer % ALIGNMENT == 0 for x in held for pointer in pointers(x.data))


def test_cut_goes_through_nested_data() -> None:
    batch = {
        "pair": Pair(torch.arange(5), numpy.arange(5)),
        "names": ["a", "b", "c", "d", "e"],
        "more": [torch.arange(5), (torch.arange(10).view(5, 2),)],
        "scale": 2.5,
        "weight": torch.tensor(3.0),
        "nothing": None,
    }
    (first, second) = split_batch(batch, WHOLE[2]).microbatches
    assert second.data["pair"].image.tolist() == [3, 4]
    assert isinstance(second.data["pair"], Pair)
    assert second.data["pair"].label.tolist() == [3, 4]
    assert first.data["names"] == ["a", "b", "c"]
    assert second.data["more"][1][0].tolist() == [[6, 7], [8, 9]]
    assert second.data["scale"] == 2.5
    assert second.data["weight"].item() == 3.0
    assert second.data["nothing"] is None


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.zeros(4), torch.zeros(3)), r"batch\[0\] has 4 samples, but batch\[1\] has 3"),
        (
            {"x": torch.zeros(4), "m": {"n": ["a"]}},
            r"batch\['x'\].* but batch\['m'\]\['n'\] has 1",
        ),
        (7, "type int cannot be split"),
        ({"scale": 1.0}, "type dict cannot be split"),
        (torch.tensor(1.0), "type Tensor cannot be split"),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        split_batch(batch, WHOLE[2])


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(DatasetError, match="the batch has no samples"):
        split_batch(torch.zeros(0, 3), WHOLE[4])


def test_a_microbatch_has_its_own_memory() -> None:
    """A model that writes into its input must not change the user's batch."""
    batch = torch.zeros(8, 16)
    for microbatch in split_batch(batch, WHOLE[4]).microbatches:
        microbatch.data.fill_(1.0)
    assert not batch.any()


def test_well_placed_tensors_are_not_copied_by_alignment() -> None:
    tensor = torch.zeros(8, 16)
    assert align_tensors(tensor) is tensor


def test_tensors_of_vmap_are_left_as_they_are() -> None:
    rows = torch.arange(6.0).view(3, 2)
    doubled = torch.func.vmap(lambda row: align_tensors((row,))[0] * 2)(rows)
    assert torch.equal(doubled, rows * 2)


def test_misplaced_tensors_are_copied_with_their_strides() -> None:
    image = torch.randn(3, 2, 5, 5).to(memory_format=torch.channels_last)
    part = image[1:]
    assert part.data_ptr() % ALIGNMENT != 0
    copy = align_tensors(part)
    assert copy.data_ptr() % ALIGNMENT == 0
    assert copy.stride() == part.stride()
    assert torch.equal(copy, part)


def test_strides_do_not_depend_on_where_a_view_lies() -> None:
    """A view that is not dense is made dense, also where it happens to be aligned."""
    base = torch.randn(64, 4)
    view = base[::2]
    assert view.data_ptr() % ALIGNMENT == 0
    assert align_tensors(view).is_contiguous()


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_aligned_keeps_the_containers(kind: type) -> None:
    data = kind(x=[torch.zeros(9)[1:]], pair=Pair(torch.zeros(9)[1:], "label"), n=3)
    result = align_tensors(data)
    assert type(result) is kind
    assert type(result["pair"]) is Pair
    assert result["pair"].label == "label"
    assert all(pointer % ALIGNMENT == 0 for pointer in pointers(result))


def test_a_mapping_that_cannot_be_rebuilt_becomes_a_dict() -> None:
    data = defaultdict(list, x=torch.zeros(9)[1:])
    assert align_tensors(data)["x"].data_ptr() % ALIGNMENT == 0


def test_sparse_tensors_pass_as_they_are() -> None:
    sparse = torch.eye(3).to_sparse()
    assert align_tensors(sparse) is sparse


def test_a_batch_that_is_unpacked_says_what_to_do() -> None:
    batch = split_batch((torch.zeros(4, 2), torch.zeros(4)), WHOLE[2])
    with pytest.raises(UsageError, match=r"cannot be unpacked: pass it whole to trainer\.step"):
        _, _ = batch


@pytest.mark.parametrize("shape", [(4, 16), (8,), (12, 2)], ids=str)
def test_parts_of_one_copy_are_as_separate_as_copies(shape):
    """A model may write into its input, and backward of another micro-batch may need that one."""
    batch = torch.arange(float(math.prod(shape))).view(shape)
    kept = batch.clone()
    first, second, *_ = [
        each.data[0]
        for each in split_batch([batch], ReplicaShare(4, on_one_host(1), 0)).microbatches
    ]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    before = second._version
    first.add_(1)
    assert second._version == before
    assert not first._is_view()
    assert torch.equal(second, kept[len(second) : 2 * len(second)])
    assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0
    assert torch.equal(batch, kept)


@pytest.mark.parametrize("columns", [15, 16, 24])
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "views"])
def test_parts_are_aligned_and_dense_in_any_layout(columns, kind):
    batch = torch.arange(7.0 * columns).view(7, columns)
    if kind == "transposed":
        batch = batch.t().contiguous().t()
    elif kind == "views":
        batch = torch.arange(7.0 * 2 * columns).view(7, 2 * columns)[:, :columns]
    for each in split_batch((batch, batch[:, 0]), ReplicaShare(3, on_one_host(1), 0)).microbatches:
        inputs, targets = each.data
        rows = slice(*{0: (0, 3), 1: (3, 5), 2: (5, 7)}[each.index])
        assert torch.equal(inputs, batch[rows])
        assert torch.equal(targets, batch[rows, 0])
        assert inputs.data_ptr() % 64 == targets.data_ptr() % 64 == 0
        assert inputs.stride() == batch[rows].clone().stride()


@dataclass
class Graph:
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((pack_sequence([torch.rand(3, 2)] * 4), torch.zeros(4)), r"batch\[0\] is a PackedSeq"),
        ((Graph(torch.rand(2), torch.rand(4)), torch.zeros(4)), r"batch\[0\]\.second has 4 rows"),
    ],
    ids=["packed", "dataclass"],
)
def test_a_container_that_is_not_split_is_refused(batch: Any, words: str) -> None:
    """Each micro-batch got all of it, or two parts that do not fit."""
    share = WHOLE[2]
    with pytest.raises(DatasetError, match=f"^{words}.*collate_fn"):
        split_batch(batch, share)
    whole = Graph(torch.rand(2), torch.rand(3))
    parts = split_batch((whole, torch.zeros(4)), share).microbatches
    assert all(part.data[0] is whole for part in parts), "no rows of the samples"
