"""Pooling whose results and indices are those of torch's kernel."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

from lockstep.portable.products import use_portable_products

SHAPES = [(2, 3, 8, 8), (1, 2, 7, 33), (3, 1, 1, 5), (5, 8, 16, 17)]
WINDOWS = [
    (2, None, 0, 1),
    (3, 2, 1, 1),
    (3, 1, 1, 1),
    ((1, 5), (2, 3), (0, 2), 1),
    (2, 4, 1, 2),
    ((4, 2), (1, 2), (2, 0), (1, 3)),
]


@pytest.fixture(autouse=True)
def threads():
    count = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(count)
    use_portable_products()


def pool(inputs, window):
    """Return what max pooling returns, and its error instead of results."""
    try:
        return functional.max_pool2d(inputs, *window, return_indices=True)
    except RuntimeError as error:
        return str(error)


def assert_as_torch(inputs, window):
    use_portable_products(False)
    expected = pool(inputs, window)
    use_portable_products()
    results = pool(inputs, window)
    if isinstance(expected, str):
        assert results == expected
        return
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=0, atol=0, equal_nan=True)
        assert result.stride() == other.stride()
    zeros = expected[0] == 0
    assert torch.equal(results[0][zeros].signbit(), expected[0][zeros].signbit())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_largest_numbers_and_their_indices_are_those_of_torch(shape, window):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ties = numbers.round()
    for inputs in (numbers, ties):
        assert_as_torch(inputs, window)
        for value, most in itertools.product((math.nan, -math.inf, math.inf), (0.2, 0.9)):
            assert_as_torch(inputs.masked_fill(numbers.sigmoid() < most, value), window)


@pytest.mark.parametrize(
    "inputs",
    [
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 8, 8).transpose(2, 3),
        torch.randn(3, 8, 8),
        torch.randn(2, 3, 8, 8, dtype=torch.float64),
        torch.randn(2, 3, 8, 8).bfloat16(),
        torch.randn(0, 3, 8, 8),
        torch.randn(2, 3, 1, 1),
    ],
    ids=lambda inputs: f"{inputs.shape} {inputs.dtype}",
)
@pytest.mark.parametrize("window", [(3, 2, 1, 1), (3, 2, 1, 1, True), (3, 2, 2), (0,), (3, 0)])
def test_other_inputs_and_wrong_arguments_are_those_of_torch(inputs, window):
    assert_as_torch(inputs, window)
