"""Rule 6: the norm of the whole gradient, from the blocks of any ranks, and clipping by it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.comm import native_module
from lockstep.kernel.exact_sum import compute_partial_sums
from lockstep.kernel.norm import (
    clip_gradients_,
    compute_norm,
    compute_squares,
)

VALUES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5)
ROWS = st.lists(VALUES, min_size=1, max_size=6)
SIZES = [1, 0, 3, 65_535, 65_536, 65_537, 131_075, 2]


def gradients(rows):
    return [torch.tensor(row) for row in rows]


def random_gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


@given(ROWS, st.floats(0.1, 1e3))
def test_it_agrees_with_torch(rows, limit):
    ours = gradients(rows)
    theirs = [nn.Parameter(torch.zeros(len(row))) for row in rows]
    for parameter, row in zip(theirs, rows, strict=True):
        parameter.grad = torch.tensor(row)
    norm = compute_norm(compute_squares(ours))
    clip_gradients_(ours, norm, limit)
    expected = float(nn.utils.clip_grad_norm_(theirs, limit))
    assert norm == pytest.approx(expected, rel=1e-5)
    for left, right in zip(ours, theirs, strict=True):
        assert torch.allclose(left, right.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_each_block_has_the_bits_of_its_own_norm(dtype):
    expected = [
        float(torch.linalg.vector_norm(block)) ** 2
        for gradient in random_gradients(dtype)
        for block in (gradient.split(65_536) if len(gradient) else ())
    ]
    assert compute_squares(random_gradients(dtype)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("permuted", [False, True])
def test_short_gradients_have_the_same_bits_with_the_native_module(dtype, permuted):
    shapes = [(1,), (10,), (64, 64), (10, 64), (3, 5, 7), (65_536,)]
    short = [torch.randn(shape).to(dtype) for shape in shapes]
    if permuted:  # which the native module leaves to torch
        short[2] = short[2].t()
    assert (native_module.find_compute_norms()(short) is None) == permuted
    expected = [float(torch.linalg.vector_norm(gradient)) ** 2 for gradient in short]
    assert compute_squares(short, measure=native_module.find_compute_norms()) == expected
    assert compute_squares(short) == expected


@pytest.mark.parametrize("parts", [2, 3, 4, 20])
def test_the_parts_are_the_whole_in_order(parts):
    found = [compute_squares(random_gradients(), part, parts) for part in range(parts)]
    assert [each for part in found for each in part] == compute_squares(random_gradients())
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_blocks_follow_the_order_of_memory():
    gradient = torch.randn(3, 700, 40).permute(2, 0, 1)
    assert compute_squares([gradient]) == compute_squares([gradient.permute(1, 2, 0)])
    assert compute_squares([gradient]) != compute_squares([gradient.contiguous()])


@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_of_the_parameters_changes_no_bit(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    norms = [compute_norm(compute_squares(gradients(each))) for each in (rows, shuffled)]
    assert norms[0] == norms[1]


def test_a_norm_within_the_limit_leaves_every_bit():
    (gradient,) = gradients([[3.0, 4.0]])
    norm = compute_norm(compute_squares([gradient]))
    assert norm == 5.0
    clip_gradients_([gradient], norm, 5.0)
    assert gradient.tolist() == [3.0, 4.0]


def test_nothing_has_the_norm_zero():
    assert compute_norm(compute_partial_sums(compute_squares([]))) == 0.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_non_finite_norm_is_returned_and_nothing_is_scaled(value):
    first, second = gradients([[value], [1.0]])
    norm = compute_norm(compute_partial_sums(compute_squares([first, second])))
    assert not math.isfinite(norm)
    clip_gradients_([first, second], norm, 1.0)
    assert second.tolist() == [1.0]


def test_a_sum_beyond_float64_is_infinite():
    assert compute_norm(compute_partial_sums([1.5e308, 1.5e308])) == math.inf
