"""The boundary: what crosses lies as it lay, to the last bit of its strides and its place."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.errors import LayoutError
from lockstep.pipeline.boundary import (
    allocate_for,
    describe_tensor,
    flatten,
    unflatten,
    view_bytes,
    view_received,
)


def crossed(tensor):
    """Send a tensor to oneself, its meta as text."""
    meta = pickle.loads(pickle.dumps(describe_tensor(tensor)))
    memory = allocate_for(meta, tensor.device)
    memory[meta.padding :].copy_(view_bytes(tensor, meta))
    return view_received(memory, meta.padding, meta)


def lying(tensor):
    lazy = tensor.is_conj(), tensor.is_neg()
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 64, lazy


BASE = torch.arange(240.0)
TENSORS = {
    "contiguous": BASE.view(2, 3, 40),
    "transposed": BASE.view(6, 40).T,
    "channels last": BASE.view(2, 3, 5, 8).to(memory_format=torch.channels_last),
    "behind a boundary": BASE[3:40],
    "gaps": BASE.view(60, 4)[:, 1],
    "expanded": BASE[5:9].view(4, 1).expand(4, 7),
    "one number everywhere": torch.tensor(3.0).expand(5, 2),
    "transposed with gaps": BASE.view(10, 24)[:, 3:9].T,
    "flags": BASE.view(2, 120) > 7,
    "bfloat16": BASE.bfloat16()[1:8],
    "complex": torch.complex(BASE, -BASE).view(12, 20)[2:],
    "conjugated": torch.complex(BASE, -BASE).view(12, 20).conj()[1:],
    "conjugated with gaps": torch.complex(BASE, -BASE).view(12, 20).conj()[:, 3:9],
    "negated, with gaps": torch.complex(BASE, -BASE).conj().imag,
    "none": torch.empty(0, 4),
    "no dimension": torch.tensor(-0.0),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_lies_where_it_lay(name):
    tensor = TENSORS[name]
    arrived = crossed(tensor)
    assert lying(arrived) == lying(tensor)
    assert torch.equal(arrived, tensor)
    assert not arrived._is_view()


def test_signs_of_zero_and_other_numbers_keep_their_bits():
    tensor = torch.tensor([-0.0, float("nan"), float("inf"), 1e-45])
    assert torch.equal(crossed(tensor).view(torch.int32), tensor.view(torch.int32))


def test_a_dense_tensor_travels_without_a_copy():
    tensor = TENSORS["channels last"]
    assert view_bytes(tensor, describe_tensor(tensor)).data_ptr() == tensor.data_ptr()


plain = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
values = st.recursive(
    plain | st.sampled_from(list(TENSORS.values())),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
def test_a_nested_value_is_put_together_as_it_was(value):
    structure, tensors = flatten(value)
    metas = [describe_tensor(tensor) for tensor in tensors]
    again, _ = pickle.loads(pickle.dumps((structure, metas)))
    assert again == structure
    assert _same(unflatten(again, tensors), value)


def _same(left, right):
    if isinstance(left, torch.Tensor):
        return left is right
    if isinstance(left, dict):
        return list(left) == list(right) and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, (tuple, list)):
        return type(left) is type(right) and all(map(_same, left, right))
    return type(left) is type(right) and left == right


def test_a_tensor_that_is_named_twice_crosses_once():
    tensor = TENSORS["contiguous"]
    structure, tensors = flatten((tensor, {"again": [tensor]}))
    assert len(tensors) == 1
    first, second = unflatten(structure, ["arrived"])
    assert (first, second) == ("arrived", {"again": ["arrived"]})


@pytest.mark.parametrize("value", [{1: torch.zeros(1)}, (object(),), [{"a": {2, 3}}]])
def test_what_cannot_cross_is_named(value):
    with pytest.raises(LayoutError, match=r"the last block of a stage returned a \w+"):
        flatten(value)


def test_a_sparse_tensor_cannot_cross():
    with pytest.raises(LayoutError, match="make it dense"):
        describe_tensor(torch.eye(3).to_sparse())
