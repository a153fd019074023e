"""Scatter and gather: every sample comes back, at its position, and so does its gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data_parallel.scatter import count_samples, join_outputs, list_tensors, take_part
from lockstep.kernel.errors import UsageError
from lockstep.kernel.splitting import count_microbatches, split_evenly

CPU = torch.device("cpu")


@given(
    samples=st.integers(1, 20),
    parts=st.integers(1, 9),
    dim=st.integers(0, 2),
    data=st.data(),
)
def test_parts_join_to_the_whole_and_gradients_split_like_it(samples, parts, dim, data):
    shape = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=2))
    shape.insert(dim, samples)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    assert count_samples((whole,), {}, dim) == samples
    spans = split_evenly(samples, count_microbatches(samples, parts))
    taken = {n: take_part(whole, span, dim, CPU) for n, span in enumerate(spans)}
    shares = {index: len(span) / samples for index, span in enumerate(spans)}
    joined, split = join_outputs(taken, shares, len(spans), dim, CPU)
    assert torch.equal(joined, whole)
    gradient = torch.randn(shape)
    assert torch.equal(torch.cat([split(gradient, index) for index in taken], dim), gradient)
    means = {index: part.mean() for index, part in taken.items()}
    mean, split = join_outputs(means, shares, len(spans), dim, CPU)
    torch.testing.assert_close(mean, whole.mean())
    one = torch.ones(())
    assert [split(one, index).item() for index in means] == [
        torch.tensor(share).item() for share in shares.values()
    ]


def test_parts_are_copies_and_a_tensor_given_twice_is_one():
    whole = torch.zeros(4)
    shared = torch.tensor(1.0)
    data = {"x": whole, "again": [whole], "s": shared, "n": 3}
    for span in split_evenly(4, 2):
        part = take_part(data, span, 0, CPU)
        assert part["x"] is part["again"][0]
        assert part["n"] == 3
        for tensor in list_tensors(part):
            tensor.add_(5)
    assert (whole.sum().item(), shared.item()) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("parts", "dim", "message"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], 0, r"shapes \(2, 3\), \(2, 4\)"),
        ([torch.ones(2), torch.ones(2)], 1, r"shape \(2,\) has no dimension 1"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(parts, dim, message):
    with pytest.raises(UsageError, match=message):
        join_outputs(dict(enumerate(parts)), {0: 0.5, 1: 0.5}, 2, dim, CPU)
