"""Memory that ranks share: one tensor for all of them, and words that they decide by."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lockstep.comm import backend
from lockstep.comm.bucket import Bucket, Member
from lockstep.comm.native_all_reduce import NativeAllReduce
from lockstep.comm.shared_memory import (
    atomic_compare_exchange,
    atomic_load,
    atomic_store,
    create_group_tensor,
    empty_shared,
    is_shared,
)
from lockstep.kernel.errors import LayoutError, WorkError

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

on_lockstep = {"backend": "lockstep"}


def mapped() -> int:
    """Return how many bytes of shared tensors this process has mapped."""
    gc.collect()
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:lockstep-shared" in line:
                begin, _, end = line.split()[0].partition("-")
                total += int(end, 16) - int(begin, 16)
    return total


# ---- tensors of a rank's own ----


def resident() -> int:
    """Return how many bytes of shared memory this process has in its page tables."""
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("RssShmem:")]
    return int(line.split()[1]) << 10


def add_large_ones(times: int, size: int) -> list[int]:
    """Add tensors that live for one call each; return the resident bytes after every call."""
    found = []
    for _ in range(times):
        tensor = empty_shared(size, dtype=torch.uint8)
        tensor[::4096] = 1
        dist.all_reduce(tensor)
        assert tensor[0] == tensor[-4096] == dist.get_world_size()
        del tensor
        found.append(resident())
    return found


def test_memory_of_large_tensors_stays_bounded_on_every_rank(ranks):
    size = 65 << 20
    for found in ranks(add_large_ones, 2, 10, size, **on_lockstep):
        assert max(found) > size  # the measure sees them
        assert max(found) < 3 * size  # my own, the other rank's, and the group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_a_buffer_of_the_backend_has_the_dtype_that_is_asked_for(dtype):
    cpu = torch.device("cpu")
    native = backend.load_native().create(
        dist.HashStore(), 0, 1, timedelta(seconds=20), "alone", [0]
    )
    buffer = native.allocate_tensor(5, dtype=dtype, device=cpu)
    assert (buffer.dtype, buffer.shape, is_shared(buffer)) == (dtype, (5,), True)


TOO_LARGE = [(1 << 31, 1 << 31), (1 << 62, 4), (0, 1 << 62, 1 << 62)]


@pytest.mark.parametrize("sizes", [*TOO_LARGE, (-1,)])
def test_a_size_that_no_memory_has_is_refused_in_one_sentence(sizes):
    with pytest.raises(ValueError, match=r"^a tensor can't have ") as told:
        backend.load_native().empty(sizes, torch.float32)
    assert "\n" not in str(told.value)


DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", [None, bool, int, float, complex, *DTYPES])
def test_empty_has_the_dtypes_of_torch_empty(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch: some types are experimental
        found = empty_shared(3, dtype=dtype)
        expected = torch.empty(3, dtype=dtype)
    assert (found.dtype, found.nbytes) == (expected.dtype, expected.nbytes)
    assert is_shared(found)


def test_empty_has_the_default_dtype_of_torch():
    torch.set_default_dtype(torch.float64)
    try:
        assert empty_shared(3).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "size", [(3,), (2, 3), ((2, 3),), ([2, 3],), ((),), (0,), (torch.Size([2]),), (np.int64(3),)]
)
def test_empty_has_the_sizes_of_torch_empty(size):
    found = empty_shared(*size)
    expected = torch.empty(*size)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())


@pytest.mark.parametrize(
    ("size", "options"),
    [
        *(((4,), {"dtype": dtype}) for dtype in ("float32", 5, str, np.float32, np.dtype("f4"))),
        *((size, {}) for size in [(), (2.5,), (True,), ("ab",), (None,), ((2,), 3), (1 << 64,)]),
        *((size, {}) for size in [(-1,), (2, -3), *TOO_LARGE[:2]]),
    ],
)
def test_empty_refuses_what_torch_empty_refuses(size, options):
    with pytest.raises((TypeError, RuntimeError)) as expected:
        torch.empty(*size, **options)
    with pytest.raises(expected.type) as told:
        empty_shared(*size, **options)
    assert str(told.value) == str(expected.value).partition("\n")[0]


@pytest.mark.parametrize("option", ["device", "requires_grad", "pin_memory", "out"])
def test_empty_refuses_options_that_it_does_not_have(option):
    with pytest.raises(TypeError, match=rf"^empty_shared\(\) got an unexpected .* '{option}'$"):
        empty_shared(3, **{option: None})


@pytest.mark.parametrize("dtype", [float, "float32", None, 5])
def test_the_native_module_takes_only_a_dtype_as_one(dtype):
    with pytest.raises(TypeError, match="incompatible function arguments"):
        backend.load_native().empty([3], dtype)


# ---- one tensor for all ranks ----


def write_and_read() -> list[object]:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    descriptors = len(os.listdir("/proc/self/fd"))
    tensor = create_group_tensor((ranks, 1000), torch.float64)
    fresh = tensor.count_nonzero().item()
    dist.barrier()
    tensor[rank] = rank + 1
    dist.barrier()
    sums = tensor.sum(1).tolist()
    view = tensor[1:]
    del tensor
    held = mapped()
    del view
    opened = len(os.listdir("/proc/self/fd")) - descriptors
    return [fresh, sums, held, mapped(), opened, create_group_tensor(0, torch.bool).shape]


def test_one_tensor_is_the_same_memory_on_every_rank_until_its_last_view(ranks):
    page = os.sysconf("SC_PAGESIZE")
    held = page + -(-3 * 8000 // page) * page
    expected = [0, [1000.0, 2000.0, 3000.0], held, 0, 0, torch.Size([0])]
    assert ranks(write_and_read, 3, **on_lockstep) == [expected] * 3


def ask_for(sizes: list[int]) -> list[str]:
    told = []
    for size in sizes:
        try:
            create_group_tensor(size + (dist.get_rank() if size == 5 else 0), torch.uint8)
        except (LayoutError, WorkError) as error:
            told.append(f"{type(error).__name__} {error}")
    dist.barrier()  # the group goes on
    return [*told, str(mapped())]


def test_too_little_memory_and_other_sizes_are_told_to_every_rank(ranks):
    for memory, more, sizes, left in ranks(ask_for, 3, [1 << 50, 1 << 70, 5], **on_lockstep):
        for told in (memory, more):
            assert told.startswith("WorkError rank 0 could not share memory: cannot reserve")
        assert "disagree" in sizes
        assert all(f"rank {rank} called share({5 + rank} bytes)" in sizes for rank in range(3))
        assert left == "0"


def test_ranks_that_may_be_on_different_hosts_share_no_tensor(ranks):
    for told, _ in ranks(ask_for, 2, [100], backend="gloo"):
        assert told.startswith("LayoutError only ranks on one host, in a group with the backend")
        assert "this group has the backend 'gloo'" in told


def test_a_rank_alone_shares_with_nobody():
    tensor = create_group_tensor((2, 3), torch.int32)
    assert tensor.tolist() == [[0, 0, 0], [0, 0, 0]]


# ---- words ----


def race(times: int) -> tuple[int, int]:
    """Let all ranks decide each word, and write their rank beside it if they were first."""
    words = create_group_tensor((2, times), torch.int64)
    won = 0
    dist.barrier()
    for number in range(times):
        me = dist.get_rank() + 1
        if atomic_compare_exchange(words[0], number, 0, me) == 0:
            won += 1
            words[1, number] = me
    dist.barrier()
    assert torch.equal(words[0], words[1])
    return won, int(words[0].count_nonzero())


def test_every_word_is_decided_once(ranks):
    results = ranks(race, 3, 2000, **on_lockstep)
    assert sum(won for won, _ in results) == 2000
    assert {decided for _, decided in results} == {2000}


def count_up(tensor: torch.Tensor, times: int) -> None:
    for _ in range(times):
        seen = atomic_load(tensor, 1)
        while (now := atomic_compare_exchange(tensor, 1, seen, seen + 1)) != seen:
            seen = now


def test_no_count_is_lost_between_threads():
    tensor = torch.zeros(3, dtype=torch.int64)
    threads = [threading.Thread(target=count_up, args=(tensor, 1000)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tensor.tolist() == [0, 3000, 0]


def test_words_keep_every_bit_and_refuse_what_is_none():
    tensor = torch.zeros(2, dtype=torch.int64)
    atomic_store(tensor, 0, -(1 << 63))
    assert atomic_load(tensor, 0) == -(1 << 63)
    assert atomic_compare_exchange(tensor, 0, 5, 6) == -(1 << 63)
    assert tensor.tolist() == [-(1 << 63), 0]
    with pytest.raises(IndexError, match="no word 2"):
        atomic_load(tensor, 2)
    for wrong in (torch.zeros(2), torch.zeros(4, dtype=torch.int64)[::2]):
        with pytest.raises(ValueError, match="contiguous int64"):
            atomic_store(wrong, 0, 1)


# ---- reproducible reduce-scatter with cuts ----


def cut_sums(cuts: list[int], scatter: bool) -> list[object]:
    """Add 4 leaves of 100 numbers; return this rank's slice, and what a wrong plan raises."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    bucket = Bucket(torch.float32, (Member(0, 100, 0),), 112)
    nodes_by_rank = [[(0, 2)], [(2, 3), (3, 4)], []][:ranks]
    native = backend.of_group(None)
    made = NativeAllReduce(native, bucket, nodes_by_rank, 4, rank, cuts=cuts, scatter=scatter)
    held = {
        node: [torch.randn(100, generator=torch.Generator().manual_seed(node[0]))]
        for node in nodes_by_rank[rank]
    }
    made.launch(held)
    [(_, total)] = made.gather()
    begin, end = (cuts[rank], min(cuts[rank + 1], 100)) if scatter else (0, 100)
    told = ""
    other = [0, *(cut + rank for cut in cuts[1:-1]), 112]
    wrong = NativeAllReduce(native, bucket, nodes_by_rank, 4, rank, cuts=other, scatter=scatter)
    wrong.launch(held)
    try:
        wrong.gather()
    except RuntimeError as error:
        told = str(error)
    return [total[begin:end].tolist(), told]


@pytest.mark.parametrize("scatter", [False, True])
def test_a_bucket_may_be_cut_anywhere_and_scattered(ranks, scatter):
    values = [torch.randn(100, generator=torch.Generator().manual_seed(lo)) for lo in (0, 2, 3)]
    whole = (values[0] + (values[1] + values[2])).tolist()
    cuts = [0, 37, 41, 112]
    found = ranks(cut_sums, 3, cuts, scatter, **on_lockstep)
    for rank, (part, told) in enumerate(found):
        assert part == (whole[cuts[rank] : min(cuts[rank + 1], 100)] if scatter else whole)
        assert "disagree" in told  # cuts that differ between ranks are never added
        assert told.count(", plan ") == 3
