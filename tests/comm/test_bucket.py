"""Buckets: pure arithmetic on sizes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.bucket import ALIGNMENT, pieces, plan, slice_length

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
TENSORS = st.lists(st.tuples(st.integers(0, 500), DTYPES), max_size=30)


@given(TENSORS, st.integers(1, 4000), st.integers(0, 400))
def test_every_tensor_is_in_one_bucket_without_overlap(tensors, capacity, overflow):
    numels = [numel for numel, _ in tensors]
    dtypes = [dtype for _, dtype in tensors]
    buckets = plan(numels, dtypes, capacity, overflow=overflow)
    assert sorted(member.index for bucket in buckets for member in bucket.members) == list(
        range(len(tensors))
    )
    for bucket in buckets:
        end = 0
        for member in bucket.members:
            assert dtypes[member.index] == bucket.dtype
            assert member.numel == numels[member.index]
            assert member.offset * bucket.dtype.itemsize % ALIGNMENT == 0
            assert member.offset >= end
            end = member.offset + member.numel
        assert bucket.length >= end
        filled = [member for member in bucket.members if member.numel]
        before_last = filled[-1].offset * bucket.dtype.itemsize if filled else 0
        assert bucket.length * bucket.dtype.itemsize <= capacity or before_last <= overflow


def test_the_last_tensors_come_first():
    buckets = plan([16] * 4, [torch.float32] * 4, capacity=128)
    assert [[member.index for member in bucket.members] for bucket in buckets] == [[3, 2], [1, 0]]


def test_a_bias_does_not_have_a_bucket_of_its_own():
    weights_and_biases = [256, 16, 256, 16]
    buckets = plan(weights_and_biases, [torch.float32] * 4, capacity=1024, overflow=64)
    assert [[member.index for member in bucket.members] for bucket in buckets] == [[3, 2], [1, 0]]
    buckets = plan(weights_and_biases, [torch.float32] * 4, capacity=1024, overflow=63)
    assert len(buckets) == 4


def test_tensors_may_have_numbers_of_their_own():
    (bucket,) = plan([16, 16], [torch.float32] * 2, capacity=1000, indices=[4, 9])
    assert [member.index for member in bucket.members] == [9, 4]


@given(TENSORS, st.integers(1, 4000), st.integers(1, 7))
def test_pieces_tile_every_member_and_stay_in_their_slice(tensors, capacity, ranks):
    for bucket in plan([n for n, _ in tensors], [d for _, d in tensors], capacity):
        length = slice_length(bucket, ranks)
        assert length * bucket.dtype.itemsize % ALIGNMENT == 0
        assert length * ranks >= bucket.length
        places = set()
        for number, member in enumerate(bucket.members):
            mine = [piece for piece in pieces(bucket, ranks) if piece.member == number]
            assert [i for piece in mine for i in range(piece.start, piece.stop)] == list(
                range(member.numel)
            )
            for piece in mine:
                stop = piece.offset + piece.stop - piece.start
                assert 0 <= piece.offset < stop <= length
                absolute = piece.slice * length + piece.offset
                assert absolute == member.offset + piece.start
                places |= {(piece.slice, place) for place in range(piece.offset, stop)}
        assert len(places) == sum(member.numel for member in bucket.members)
