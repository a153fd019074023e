"""Assertions about tensors: in this process, on all ranks, and for several widths."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import lockstep
from pytest_lockstep import (
    assert_same_bits,
    assert_same_on_ranks,
    assert_width_invariant,
    run,
)

ONE = torch.ones(2, 3)


def changed(value, dtype=torch.float32):
    tensor = ONE.to(dtype).clone()
    tensor[1, 2] = value
    return tensor


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            changed(1.0000001),
            r"the tensor differs: 1 of 6 elements, by at most 1.19e-07 \(1 ulp\); the first at "
            r"\[1, 2\]: 1.0\d* on actual, 1.0 on expected",
        ),
        (changed(float("nan")), r"1 of 6 elements; the first at \[1, 2\]: nan on actual"),
        (ONE.double(), r"float64 of shape \(2, 3\) on actual, float32 of shape \(2, 3\) on exp"),
        (ONE[0], r"float32 of shape \(3,\) on actual, float32 of shape \(2, 3\) on expected"),
    ],
)
def test_the_first_difference_is_described(other, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(other, ONE)


def test_bits_count_not_values():
    assert_same_bits(changed(float("nan")), changed(float("nan")))
    assert_same_bits(ONE.t(), ONE.t().contiguous())
    assert_same_bits(torch.ones(0), torch.ones(0))
    with pytest.raises(AssertionError, match=r"0 \(opposite signs\).* 0.0 on actual, -0.0 on"):
        assert_same_bits(torch.zeros(1), -torch.zeros(1))
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64):
        assert_same_bits(ONE.to(dtype), ONE.to(dtype))
        with pytest.raises(AssertionError, match=r"1 of 6 elements.* at \[1, 2\]"):
            assert_same_bits(changed(0, dtype), ONE.to(dtype))


def test_nested_tensors_are_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    other.load_state_dict(model.state_dict())
    assert_same_bits(model, other)
    with torch.no_grad():
        other[0].bias[1] += 1
    with pytest.raises(AssertionError, match=r"^0.bias differs: 1 of 2 elements"):
        assert_same_bits(model, other)
    with pytest.raises(AssertionError, match=r"^b\.1 differs"):
        assert_same_bits({"a": ONE, "b": [ONE, ONE]}, {"a": ONE, "b": [ONE, changed(2)]})
    with pytest.raises(AssertionError, match="'b' is in actual, but not in expected"):
        assert_same_bits({"a": ONE, "b": ONE}, {"a": ONE})
    with pytest.raises(TypeError, match="not an object of type str"):
        assert_same_bits("a", "a")


@pytest.mark.ranks(1, 3)
def test_ranks_that_agree(group):
    assert_same_on_ranks(ONE)
    assert_same_on_ranks({"a": ONE, "b": [ONE]}, group)


@pytest.mark.ranks(3)
def test_ranks_that_differ_are_named_on_all_ranks(rank):
    with pytest.raises(
        AssertionError,
        match=r"^b on ranks 1 and 2 differs from that on rank 0: 1 of 6 elements, by at most 1 "
        r"\(\d+ ulps\); the first at \[1, 2\]: 1.0 on rank 0, 2.0 on rank 1$",
    ):
        assert_same_on_ranks({"a": ONE, "b": changed(1 + rank)})
    with pytest.raises(AssertionError, match="ranks 0 and 2 have different tensors: 'c'"):
        assert_same_on_ranks({"a": ONE, **({"c": ONE} if rank == 2 else {})})
    dist.barrier()


def test_a_step_that_is_width_invariant():
    def step():
        size = dist.get_world_size()
        rank = dist.get_rank()
        total = torch.arange(8.0)[rank * 8 // size : (rank + 1) * 8 // size].sum()
        dist.all_reduce(total)
        return {"total": total}

    assert_width_invariant(step)


def test_a_step_that_is_not():
    def scaled():
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, 1 + dist.get_world_size() * 1e-7)
        return model

    with pytest.raises(AssertionError) as caught:
        assert_width_invariant(scaled, widths=(1, 2))
    message = str(caught.value)
    assert message.startswith(
        "weight on rank 0 of 2 ranks differs from that on 1 rank, only in bits "
        "(torch.testing.assert_close accepts it): 1 of 1 elements, by at most 1.19e-07 (1 ulp)"
    )
    assert_width_invariant(scaled, widths=(1, 2), rtol=1e-5)
    with pytest.raises(AssertionError, match=r"beyond the tolerance \(rtol=1e-09, atol=0\)"):
        assert_width_invariant(scaled, widths=(1, 2), rtol=1e-9)


def test_run_returns_the_values_of_all_ranks():
    offset = 10
    assert run(lambda x: dist.get_rank() + x + offset, 1, ranks=3) == [11, 12, 13]
    assert run(lambda: dist.get_backend(), ranks=1, backend="gloo") == ["gloo"]
    assert run(lambda: (dist.is_initialized(), os.environ["RANK"]), ranks=1, init=False) == [
        (False, "0")
    ]

    def fail():
        assert dist.get_rank() != 1, "not here"
        dist.barrier()

    with pytest.raises(lockstep.LockstepError, match="rank 1 raised AssertionError: not here"):
        run(fail, ranks=2)

    def hang():
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            import threading

            threading.Event().wait()

    with pytest.raises(lockstep.LockstepError, match=r"after 2 s .*rank 0 was in barrier"):
        run(hang, ranks=2, timeout=2)
    assert "RANK" not in os.environ
