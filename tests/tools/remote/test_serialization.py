"""Serialization: values arrive unchanged, and a view is sent without what surrounds it."""

from __future__ import annotations

import pickle

import pytest
import torch

from lockstep.tools.remote.serialization import serialize


def sent(value):
    return pickle.loads(serialize(value))


LARGE = torch.arange(24, dtype=torch.float32).reshape(2, 3, 2, 2)
TENSORS = {
    "plain": LARGE,
    "channels last": LARGE.to(memory_format=torch.channels_last),
    "transposed": LARGE[0, 0].T,
    "with gaps": LARGE[:, ::2],
    "a slice": LARGE[1:],
    "expanded": torch.ones(1).expand(4),
    "empty": torch.empty(0, 3),
    "a number": torch.tensor(3.5),
    "bool": LARGE > 3,
    "bfloat16": LARGE.bfloat16(),
    "complex": LARGE.to(torch.complex64),
    "conjugate": LARGE.to(torch.complex64).conj(),
    "sparse": LARGE[0, 0].to_sparse(),
    "meta": torch.empty(2, 3, device="meta"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_unchanged(name):
    tensor = TENSORS[name]
    received = sent(tensor)
    assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
    assert received.device == tensor.device
    if name != "meta":
        assert torch.equal(received.to_dense(), tensor.to_dense())
    if tensor.layout is torch.strided and name not in ("with gaps", "expanded"):
        assert received.stride() == tensor.stride()


def test_a_view_is_sent_without_the_memory_around_it():
    assert len(serialize(torch.randn(1 << 16)[5:7])) < 1000


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_received_tensor_begins_on_a_64_byte_boundary(size):
    for tensor in sent([torch.zeros(size, dtype=torch.uint8)] * 2 + [torch.zeros(size)]):
        assert tensor.data_ptr() % 64 == 0


def test_a_received_tensor_is_writable():
    received = sent(torch.zeros(3))
    received += 1
    assert received.tolist() == [1.0] * 3


def test_modules_keep_tied_weights_and_requires_grad():
    first = torch.nn.Linear(3, 3)
    second = torch.nn.Linear(3, 3)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    received = sent(torch.nn.Sequential(first, second))
    assert received[0].weight is received[1].weight
    assert received[0].weight.requires_grad
    assert not received[1].bias.requires_grad
    assert torch.equal(received[1].bias, second.bias)
