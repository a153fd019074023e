"""Reductions across simulated hosts: the bits are those of one host, for any placement."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import backend as native
from lockstep.comm.hosts import reduction
from lockstep.comm.hosts.backend import Card
from lockstep.comm.hosts.reduction import HostReducer
from lockstep.comm.hosts.reduction_pipeline import Agreement
from placed import simulated_hosts

pytestmark = pytest.mark.skipif(not native.available(), reason="not built")

PLACEMENTS = {
    2: [((0,), (1,))] * 2,
    3: [((0, 1), (2,)), ((0, 2), (1,)), ((0,), (1,), (2,))],
    4: [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0,), (1, 2, 3))],
}
SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM = range(9)
NAMES = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
COMPLEX = [torch.complex64, torch.complex128]
CASES = [
    *((dtype, n) for dtype in FLOATS for n in (SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM)),
    *((dtype, n) for dtype in COMPLEX for n in (SUM, AVG, PREMUL_SUM)),
    *((dtype, n) for dtype in INTEGERS for n in (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR)),
    *((torch.bool, n) for n in (SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR)),
]


def rank_values(dtype, length, rank):
    generator = torch.Generator().manual_seed(rank)
    bits = torch.randint(0, 256, (length * dtype.itemsize,), generator=generator)
    if dtype == torch.bool:
        return bits > 127
    if not (dtype.is_floating_point or dtype.is_complex):
        return bits.to(torch.uint8).view(dtype)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    values *= 10.0 ** torch.randint(-3, 4, (length,), generator=generator)
    found = values.to(dtype)
    if dtype.is_floating_point and length > 9:
        found[7], found[8] = float("nan"), -0.0 if rank % 2 else 0.0
        found[9] = float("inf") if rank % 2 else float("-inf")
    return found


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def operation(number, rank):
    if number == PREMUL_SUM:
        return dist._make_nccl_premul_sum(0.3 + rank)
    return getattr(dist.ReduceOp, NAMES[number])


def factors(number, ranks):
    return [0.3 + rank for rank in range(ranks)] if number == PREMUL_SUM else []


def check_all_reduce(reducer, one_host, dtype, number, length):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected = rank_values(dtype, length, rank)
    found = expected.clone()
    dist.all_reduce(expected, operation(number, rank), group=one_host)
    reducer.all_reduce(found, number, factors(number, ranks))
    assert torch.equal(bits(found), bits(expected))


def check_reduce(reducer, one_host, dtype, number, length):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected = rank_values(dtype, length, rank)
    found = expected.clone()
    dist.reduce(expected, ranks - 1, operation(number, rank), group=one_host)
    reducer.reduce(found, number, ranks - 1, factors(number, ranks))
    if rank != ranks - 1:
        expected = rank_values(dtype, length, rank)
    assert torch.equal(bits(found), bits(expected))


def check_reduce_scatter(reducer, one_host, dtype, number, length):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs = [rank_values(dtype, length, rank * ranks + each) for each in range(ranks)]
    found, expected = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
    dist.reduce_scatter(expected, inputs, operation(number, rank), group=one_host)
    reducer.reduce_scatter(inputs, found, number, factors(number, ranks))
    assert torch.equal(bits(found), bits(expected))


@pytest.mark.ranks(2, 3, 4, backend="gloo")
def test_every_reduction_of_every_dtype_has_the_bits_of_one_host(world_size, monkeypatch):
    """Run every dtype and reduction; the operation, the placement and the length take turns."""
    monkeypatch.setattr(reduction, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(reduction, "LEAST_MESSAGE_BYTES", 64)
    one_host = dist.new_group(list(range(world_size)), backend="lockstep")
    lengths = itertools.cycle([501, 1, 130, 2003, 0])
    checks = itertools.cycle([check_all_reduce, check_reduce, check_reduce_scatter])
    placements = PLACEMENTS[world_size]
    for number, hosts in enumerate(placements):
        with simulated_hosts(hosts) as group:
            reducer = HostReducer(group)
            for case in CASES[number % 2 :: 2]:
                next(checks)(reducer, one_host, *case, next(lengths))
            for dtype in (torch.float32, torch.bfloat16):
                check_all_reduce(reducer, one_host, dtype, SUM, 20_011)
    dist.destroy_process_group(one_host)


@pytest.mark.ranks(2, backend="gloo")
def test_all_messages_have_the_tags_of_the_call(world_size, monkeypatch):
    monkeypatch.setattr(reduction, "CHUNK_BYTES", 4096)
    with simulated_hosts(((0,), (1,))) as group:
        reducer, tags = HostReducer(group), set()

        def record(call):
            return lambda tensor, rank, tag: (tags.add(tag), call(tensor, rank, tag))[1]

        for name in ("send", "receive"):
            monkeypatch.setattr(reducer, name, record(getattr(reducer, name)))
        expected = set()
        for number in (3, 1 << 28, (1 << 32) - 1):
            agreement = Agreement(number)
            expected.update(agreement.tags[:2])
            reducer.all_reduce(torch.ones(5000), SUM, (), agreement)  # terms only
            reducer.all_reduce(torch.ones(5000, dtype=torch.bfloat16), AVG, (), agreement)
            reducer.reduce_scatter([torch.ones(9)] * 2, torch.ones(9), SUM, (), agreement)
        assert tags <= expected
        assert len(tags) >= 3
        assert max(tags) < 1 << 30  # torch takes 31 bits, and other messages have the highest


def test_different_calls_have_different_tags():
    call = SimpleNamespace(
        number=1, is_uneven=False, op="all_reduce", reduction="SUM", dtype="float32", root=-1,
        count=4,
    )  # fmt: skip
    same = Card(Card.pack(call, 0)), Card(Card.pack(call, 16))
    assert same[0].tag == same[1].tag
    changes = {"number": 2, "op": "reduce", "reduction": "MAX", "dtype": "int8", "count": 5}
    others = [
        Card(Card.pack(SimpleNamespace(**vars(call) | {k: v}), 0)) for k, v in changes.items()
    ]
    assert len({Agreement(each.tag).tags for each in (*others, same[0])}) == 6
