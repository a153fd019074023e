"""Batches of loader workers: the data of the process itself, in memory of their own."""

from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lockstep.data.iterable_dataset import IterableSource
from lockstep.data.loader import Batches
from lockstep.kernel.errors import SampleError


class Rows(Dataset):
    """Sample i has 500 numbers that tell it apart."""

    def __len__(self):
        return 160

    def __getitem__(self, index):
        return torch.arange(500) + 1000 * index, index


class Stream(IterableDataset):
    def __iter__(self):
        return (Rows()[index] for index in range(160))


def parts(dataset, workers, **options):
    """Yield the data of each batch, in two micro-batches."""
    for batch in Batches(dataset, 4, microbatches=2, num_workers=workers, **options):
        yield [microbatch.data for microbatch in batch.microbatches]


def require_same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert found.layout == expected.layout
        assert found.dtype == expected.dtype
        if expected.layout is torch.strided:
            assert found.stride() == expected.stride()
            assert found.data_ptr() % 64 == 0
        assert torch.equal(found.to_dense(), expected.to_dense())
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            require_same(one, other)
    elif isinstance(expected, dict):
        require_same(list(found.items()), list(expected.items()))
    else:
        assert numpy.array_equal(found, expected)


@pytest.mark.parametrize("dataset", [Rows(), Stream()], ids=["map", "iterable"])
def test_batches_are_those_of_the_process_itself(dataset):
    for found, expected in zip(parts(dataset, 1), parts(dataset, 0), strict=True):
        require_same(found, expected)


def test_data_that_is_held_does_not_change():
    held = []
    for number, found in enumerate(parts(Rows(), 2)):
        if number % 2:
            (images, labels), _ = found
            held.append((number, images[1:, ::7], labels.numpy()))
    expected = list(parts(Rows(), 0))
    for number, images, labels in held:
        (whole, names), _ = expected[number]
        assert torch.equal(images, whole[1:, ::7])
        assert numpy.array_equal(labels, names.numpy())


def kinds(samples):
    images = torch.stack([sample[0] for sample in samples]).float()
    return {
        "images": images,
        "again": (images, images.bfloat16(), images > 3),
        "views": [images.t(), images[:, ::3], images[0].expand(5, -1), images[:0], images[0, 0]],
        "last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "turned": torch.rand(2, 3, 4).permute(2, 0, 1),
        "others": [torch.rand(3).to(torch.complex64).conj(), torch.rand(3)._neg_view()],
        "plain": ["text", 3, None, numpy.arange(3), get_worker_info() is None],
    }


def test_any_data_is_that_of_the_process_itself():
    for found, expected in zip(
        parts(Rows(), 1, collate_fn=kinds), parts(Rows(), 0, collate_fn=kinds), strict=True
    ):
        require_same(found, expected)
        assert found[0]["images"] is found[0]["again"][0]


class Checked(NamedTuple("Checked", [("rows", torch.Tensor), ("label", str)])):
    """A named tuple that checks its parts and takes its arguments in another way."""

    def __new__(cls, samples):
        rows = torch.stack([sample[0] for sample in samples])
        assert rows.device.type == "cpu"
        return super().__new__(cls, rows, "checked")

    def __getnewargs__(self):
        return (list(zip(self.rows, strict=True)),)


class CheckedMapping(UserDict):
    """A mapping whose values are tensors, with an attribute of its own."""

    def __init__(self, values, name=""):
        super().__init__(values)
        self.name = name

    def __setitem__(self, key, value):
        assert isinstance(value, torch.Tensor)
        super().__setitem__(key, value)


@dataclass
class Record:
    """A batch that torch leaves as it is."""

    rows: torch.Tensor


def checked_kinds(samples):
    rows = torch.stack([sample[0] for sample in samples]).float()
    packed = pack_sequence([*rows], enforce_sorted=False)
    return [packed, Checked(samples), CheckedMapping({"rows": rows}, "named"), Record(rows)]


@pytest.mark.parametrize("workers", [0, 1])
def test_containers_that_check_their_parts_are_rebuilt(workers):
    """They were made of places in memory, and the error of a worker named none of it."""
    for data in parts(Rows(), workers, collate_fn=checked_kinds):
        for packed, checked, mapping, record in data:
            rows = record.rows
            assert isinstance(packed, PackedSequence)
            assert packed.data.data_ptr() % 64 == 0
            assert torch.equal(torch.nn.utils.rnn.unpack_sequence(packed)[0], rows[0])
            assert type(checked) is Checked
            assert checked.label == "checked"
            assert torch.equal(checked.rows, rows.long())
            assert type(mapping) is CheckedMapping
            assert mapping.name == "named"
            assert torch.equal(mapping["rows"], rows)


def test_the_error_of_a_worker_is_shown(monkeypatch):
    """The first line of torch's message only says that there was one."""

    def fail(source):
        raise RuntimeError("what went wrong")

    monkeypatch.setattr(IterableSource, "__iter__", fail)
    with pytest.raises(SampleError, match=r"Caught RuntimeError.*RuntimeError: what went wrong;"):
        list(parts(Stream(), 1))


@pytest.mark.parametrize("data", [[lambda: 0], [lambda: 0, torch.ones(3)]], ids=len)
def test_data_that_cannot_be_sent_is_one_sentence(data):
    def collate(samples):
        return data

    with pytest.raises(SampleError, match=r"^the batch cannot be sent .*num_workers=0 \(replica 0"):
        list(parts(Rows(), 1, collate_fn=collate))


def test_a_tensor_that_is_sent_on_is_copied():
    """Another process may keep it for longer than this one."""
    assert not next(parts(Rows(), 1))[0][0].is_shared()


def test_systems_without_anonymous_files_use_torchs_memory(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    for found, expected in zip(parts(Rows(), 1), parts(Rows(), 0), strict=True):
        require_same(found, expected)
