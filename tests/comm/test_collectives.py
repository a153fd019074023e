"""Moving bytes between real processes."""

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.collectives import PAGE, all_gather_bytes, broadcast_tensors
from lockstep.errors import DisagreementError


@pytest.mark.parametrize("n", [1, 2, 3])
def test_messages_of_any_length_reach_everybody(ranks, n):
    def exchange():
        rank = dist.get_rank()
        short = all_gather_bytes(b"x" * rank, "short")
        mixed = all_gather_bytes(bytes([rank]) * (PAGE * 2 * rank), "mixed")
        edge = all_gather_bytes(bytes([rank]) * (PAGE - 14 + rank), "edge")
        return short, mixed, edge

    for short, mixed, edge in ranks(exchange, n):
        assert short == [b"x" * rank for rank in range(n)]
        assert mixed == [bytes([rank]) * (PAGE * 2 * rank) for rank in range(n)]
        assert edge == [bytes([rank]) * (PAGE - 14 + rank) for rank in range(n)]


def test_ranks_that_do_different_things_are_told_apart(ranks):
    def exchange():
        about = "saving" if dist.get_rank() == 1 else "in step 3"
        try:
            all_gather_bytes(b"", about)
        except DisagreementError as error:
            return str(error)

    for message in ranks(exchange, 3):
        assert message.startswith("rank 1 is saving while rank 0 is in step 3: make the same calls")


def test_a_remark_explains_where_ranks_do_different_things_and_is_not_compared(ranks):
    def exchange():
        rank = dist.get_rank()
        long = all_gather_bytes(bytes([rank]) * 900, "alike", remark="late" * rank)
        try:
            all_gather_bytes(b"", f"in step {rank}", remark="step 0 failed" if rank == 1 else "")
        except DisagreementError as error:
            return long, str(error)

    for long, message in ranks(exchange, 2):
        assert long == [b"\0" * 900, b"\1" * 900]
        assert message.endswith("with the same arguments (on rank 1, step 0 failed)")


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


def test_everybody_has_the_first_ranks_tensors(ranks):
    def broadcast():
        tensors = make(dist.get_rank())
        strides = [tensor.stride() for tensor in tensors]
        broadcast_tensors(tensors)
        assert [tensor.stride() for tensor in tensors] == strides
        return [torch.equal(*pair) for pair in zip(tensors, make(0), strict=True)]

    for same in ranks(broadcast, 3):
        assert all(same)


def test_large_tensors_are_cut_into_packets(ranks):
    def broadcast():
        from lockstep.comm import collectives

        collectives.PIECE = 1000
        tensors = [torch.full((300,), float(dist.get_rank() + i)) for i in range(5)]
        broadcast_tensors(tensors)
        return [tensor.unique().tolist() for tensor in tensors]

    for seen in ranks(broadcast, 2):
        assert seen == [[float(i)] for i in range(5)]
