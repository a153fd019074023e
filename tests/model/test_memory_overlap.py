"""Tensors that have memory in common are found; those that lie side by side are not."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.model.memory_overlap import find_overlaps, find_parameter_overlaps

BASE = torch.zeros(240)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([BASE, BASE.view(2, 120)], [(0, 1)]),
        ([BASE[:100], BASE[100:], BASE[99:101]], [(0, 2), (1, 2)]),
        ([BASE.view(60, 4)[:, n] for n in range(4)], []),
        ([BASE.view(60, 4)[:, 1], BASE.view(60, 4)[:, 1:3]], [(0, 1)]),
        ([BASE.view(60, 4)[:, 1], BASE[5:9].expand(3, 4)], [(0, 1)]),
        ([BASE.view(torch.int16)[:3], BASE[1:2]], [(0, 1)]),
        ([BASE.view(torch.int16)[:2], BASE[1:2]], []),
        ([BASE[:0], BASE, torch.zeros(240)], []),
        ([torch.empty(4, device="meta"), torch.empty(4, device="meta")], []),
        ([BASE, BASE.to_sparse()], []),
    ],
)
def test_pairs_with_memory_in_common(tensors, expected):
    assert find_overlaps(tensors) == expected


views = st.builds(
    lambda offset, sizes, strides: torch.as_strided(BASE, sizes, strides[: len(sizes)], offset),
    st.integers(0, 100),
    st.lists(st.integers(1, 4), max_size=3),
    st.lists(st.integers(0, 11), min_size=3, max_size=3),
)


@given(st.lists(views, min_size=2, max_size=4))
def test_two_views_overlap_where_an_element_belongs_to_both(tensors):
    places = [
        set(
            torch.arange(240).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist()
        )
        for t in tensors
    ]
    expected = [(a, b) for a, b in combinations(range(len(tensors)), 2) if places[a] & places[b]]
    assert find_overlaps(tensors) == expected


def test_parameters_are_named_and_a_tied_one_is_one():
    a = nn.Linear(3, 3)
    b = nn.Linear(3, 3)
    c = nn.Linear(3, 3)
    b.weight = a.weight
    c.weight.data = a.weight.data
    c.register_buffer("copy", b.bias.data)
    c.register_buffer("again", c.copy.view(3, 1))  # two buffers
    model = nn.Sequential(a, b, c)
    assert find_parameter_overlaps({"": model}) == [
        ("0.weight", "2.weight"),
        ("1.bias", "2.copy"),
        ("1.bias", "2.again"),
    ]
    c.seen = c.bias.data
    assert ("2.bias", "2.seen") not in find_parameter_overlaps({"": model})
    assert ("2.bias", "2.seen") in find_parameter_overlaps({"": model}, attributes=True)
    assert find_parameter_overlaps({"": a, "Other": c}) == [
        ("weight", "Other.weight"),
    ]
