"""Clipping: the norm over all parameters, whoever adds it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.train.clipping import clip

VALUES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5)


def parameters(rows):
    found = []
    for row in rows:
        parameter = nn.Parameter(torch.zeros(len(row)))
        parameter.grad = torch.tensor(row)
        found.append(parameter)
    return found


@given(st.lists(VALUES, min_size=1, max_size=5), st.floats(0.1, 1e3))
def test_it_agrees_with_torch(rows, limit):
    ours, theirs = parameters(rows), parameters(rows)
    norm = clip(ours, limit)
    expected = float(nn.utils.clip_grad_norm_(theirs, limit))
    assert norm == pytest.approx(expected, rel=1e-5)
    for left, right in zip(ours, theirs, strict=True):
        assert torch.allclose(left.grad, right.grad, rtol=1e-4, atol=1e-6)


@given(st.lists(VALUES, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_the_parameters_changes_no_bit(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert clip(parameters(rows), 1.0) == clip(parameters(shuffled), 1.0)


def test_a_norm_within_the_limit_leaves_every_bit():
    (parameter,) = parameters([[3.0, 4.0]])
    assert clip([parameter], 5.0) == 5.0
    assert parameter.grad.tolist() == [3.0, 4.0]


def test_parameters_without_a_gradient_are_passed_over():
    assert clip([nn.Parameter(torch.ones(2))], 1.0) == 0.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_no_number_is_returned_and_nothing_is_scaled(value):
    first, second = parameters([[value], [1.0]])
    assert not math.isfinite(clip([first, second], 1.0))
    assert second.grad.tolist() == [1.0]
