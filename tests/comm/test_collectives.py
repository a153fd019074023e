"""Moving bytes between real processes."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import backend as native
from lockstep.comm import collectives
from lockstep.comm.collectives import (
    PAGE,
    all_gather_bytes,
    broadcast_bytes,
    broadcast_tensors,
    gather_unless_equal,
)
from lockstep.kernel.errors import DisagreementError
from pytest_lockstep import assert_same_bits


@pytest.mark.ranks(1, 2, 3)
def test_messages_of_any_length_reach_everybody(rank, world_size):
    assert all_gather_bytes(b"x" * rank, "short") == [b"x" * each for each in range(world_size)]
    for about, size in (
        ("mixed", lambda each: PAGE * 2 * each),
        ("edge", lambda each: PAGE - 14 + each),
    ):
        found = all_gather_bytes(bytes([rank]) * size(rank), about)
        assert found == [bytes([each]) * size(each) for each in range(world_size)]


@pytest.mark.ranks(3)
def test_what_differs_between_ranks(rank):
    assert gather_unless_equal(b"same", "equal") == []
    assert gather_unless_equal(b"%d" % rank, "other") == [b"0", b"1", b"2"]
    assert broadcast_bytes(b"%d" % rank * 9000, "first") == b"0" * 9000


needs_native = pytest.mark.skipif(not native.available(), reason="not built")


@needs_native
@pytest.mark.ranks(2)
def test_messages_arrive_after_an_exception_has_left_a_coalescing_manager(rank):
    """torch leaves its group coalescing then, and calls are queued (a crash once)."""
    group = dist.new_group(backend="lockstep")
    with contextlib.suppress(ZeroDivisionError), dist._coalescing_manager(group):
        raise ZeroDivisionError
    for _ in range(20):
        message = bytes([rank]) * 3000
        assert all_gather_bytes(message, "here", group) == [b"\0" * 3000, b"\1" * 3000]
    with pytest.warns(UserWarning, match="coalesced"):
        dist.destroy_process_group(group)


@needs_native
@pytest.mark.ranks(2)
def test_a_destroyed_group_gathers_no_messages(rank):
    """It had crashed."""
    group = dist.new_group(backend="lockstep")
    found = native.of_group(group)
    dist.destroy_process_group(group)
    for call in (lambda: found.all_gather_bytes(b""), lambda: found.longest_message):
        with pytest.raises(dist.DistBackendError, match="the group was destroyed"):
            call()


@pytest.mark.ranks(3)
def test_ranks_that_do_different_things_are_told_apart(rank):
    message = "^rank 1 is saving while rank 0 is in step 3: make the same calls"
    with pytest.raises(DisagreementError, match=message):
        all_gather_bytes(b"", "saving" if rank == 1 else "in step 3")


@pytest.mark.ranks(2)
def test_a_remark_explains_where_ranks_do_different_things_and_is_not_compared(rank):
    long = all_gather_bytes(bytes([rank]) * 900, "alike", remark="late" * rank)
    assert long == [b"\0" * 900, b"\1" * 900]
    message = r"with the same arguments \(on rank 1, step 0 failed\)$"
    with pytest.raises(DisagreementError, match=message):
        all_gather_bytes(b"", f"in step {rank}", remark="step 0 failed" if rank == 1 else "")


def make(rank):
    generator = torch.Generator().manual_seed(rank)
    base = torch.randn(6, 8, generator=generator)
    return [
        base[:, ::2],  # not contiguous: Gloo would broadcast it wrongly
        torch.randn(2, 3, 4, 4, generator=generator).contiguous(memory_format=torch.channels_last),
        torch.tensor(rank, dtype=torch.int64),
        torch.tensor([rank % 2 == 0]),
        torch.empty(0),
        torch.randn(5, generator=generator).to(torch.bfloat16),
        torch.randn(3, generator=generator, dtype=torch.float64),
    ]


@pytest.mark.ranks(3)
def test_everybody_has_the_first_ranks_tensors(rank):
    tensors = make(rank)
    strides = [tensor.stride() for tensor in tensors]
    broadcast_tensors(tensors)
    assert [tensor.stride() for tensor in tensors] == strides
    assert_same_bits(tensors, make(0))


@pytest.mark.ranks(2)
def test_large_tensors_are_cut_into_packets(rank, monkeypatch):
    monkeypatch.setattr(collectives, "PIECE", 1000)
    tensors = [torch.full((300,), float(rank + i)) for i in range(5)]
    broadcast_tensors(tensors)
    assert [tensor.unique().tolist() for tensor in tensors] == [[float(i)] for i in range(5)]
