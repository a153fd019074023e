"""The reproducible all-reduce: against the tree in one process, bit for bit, on real processes."""

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import backend as native
from lockstep.comm.bucket import plan
from lockstep.comm.make_all_reduce import make_all_reduce
from lockstep.comm.memory_format import in_layout_of
from lockstep.comm.native_all_reduce import NativeAllReduce, native_backend
from lockstep.comm.reproducible_all_reduce import add_lists, reproducible_all_reduce
from lockstep.kernel.norm import in_memory_order
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.tree import TreeAccumulator, nodes_of, total

BACKENDS = ("gloo", "lockstep") if native.available() else "gloo"
SHAPES = [(3, 5), (0,), (129,), (2, 3, 4, 5), (1,), (7, 11), (1000,)]
NEGATIVE_ZERO = 4  # the tensor that is -0.0 in one leaf and absent in all others


def leaf_values(leaves, dtype, absent=True):
    """Return every leaf's tensors, of very different sizes, some absent."""
    generator = torch.Generator().manual_seed(leaves)
    found = []
    for leaf in range(leaves):
        row = []
        for number, shape in enumerate(SHAPES):
            value = torch.randn(shape, generator=generator)
            value *= 10 ** torch.randint(-3, 4, shape, generator=generator).float()
            value = value.to(dtype)
            if len(shape) == 4:
                value = value.contiguous(memory_format=torch.channels_last)
            row.append(None if absent and (leaf + number) % 5 == 0 else value)
        row[NEGATIVE_ZERO] = torch.tensor([-0.0], dtype=dtype) if leaf == 0 else None
        found.append(row)
    return found


def bits(tensor):
    return None if tensor is None else tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def expected_sums(values, leaves):
    def add(left, right):
        return left if right is None else right if left is None else left + right

    return [
        total({(leaf, leaf + 1): values[leaf][number] for leaf in range(leaves)}, leaves, add)
        for number in range(len(SHAPES))
    ]


def sums_on_a_rank(leaves, dtype, capacity, absent, divisor=1):
    """Return the bits of every sum, twice, as this rank sees them."""
    owned = split_evenly(leaves, dist.get_world_size())
    values = leaf_values(leaves, dtype, absent)
    fold = TreeAccumulator(leaves, add_lists)
    for leaf in owned[dist.get_rank()]:
        fold.put((leaf, leaf + 1), [None if v is None else v.clone() for v in values[leaf]])
    nodes_by_rank = [nodes_of(each, leaves) for each in owned]
    buckets = plan([torch.Size(shape).numel() for shape in SHAPES], [dtype] * len(SHAPES), capacity)
    device = torch.device("cpu")
    sums = [make_all_reduce(b, nodes_by_rank, leaves, device, divisor=divisor) for b in buckets]
    seen = []
    for _ in range(2):  # the buffers are used again
        found = dict(reproducible_all_reduce(sums, fold.nodes))
        row = []
        for number, shape in enumerate(SHAPES):
            layout = torch.empty(shape, dtype=dtype)
            if len(shape) == 4:
                layout = layout.contiguous(memory_format=torch.channels_last)
            vector = found[number]
            assert vector is None or vector.data_ptr() % 64 == 0
            row.append(None if vector is None else bits(in_layout_of(vector, layout)))
        seen.append(row)
    return seen


def check_sums(leaves, dtype):
    expected = [bits(each) for each in expected_sums(leaf_values(leaves, dtype), leaves)]
    assert expected[NEGATIVE_ZERO] == bits(torch.tensor([-0.0], dtype=dtype))
    assert sums_on_a_rank(leaves, dtype, 300, True) == [expected, expected]


@pytest.mark.ranks(1, 2, 3, 4, backend=BACKENDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_the_sum_is_the_tree_bit_for_bit(world_size, dtype):
    for leaves in {1: (3,), 2: (8,), 3: (8, 3), 4: (8, 7)}[world_size]:
        check_sums(leaves, dtype)


@pytest.mark.ranks(3, backend=BACKENDS)
def test_bits_do_not_depend_on_the_bucket_size():
    small, middle, large = (
        sums_on_a_rank(8, torch.float32, capacity, True) for capacity in (64, 700, 1 << 20)
    )
    assert small == middle == large


@pytest.mark.ranks(3, backend=BACKENDS)
def test_all_present_takes_the_whole_slice_and_gives_the_same_bits():
    values = leaf_values(8, torch.float32, absent=False)
    expected = [bits(each) for each in expected_sums(values, 8)]
    assert sums_on_a_rank(8, torch.float32, 1 << 20, False) == [expected, expected]


@pytest.mark.ranks(3, backend=BACKENDS)
def test_a_mean_is_the_sum_divided_once():
    values = leaf_values(3, torch.float32)
    expected = [bits(None if each is None else each / 3) for each in expected_sums(values, 3)]
    assert sums_on_a_rank(3, torch.float32, 300, True, 3) == [expected, expected]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(3.0).expand(4, 3),
        torch.tensor(7.0),
        torch.empty(0, 3),
        torch.arange(12.0).view(1, 12).t(),
    ],
    ids=["contiguous", "transposed", "channels-last", "gaps", "overlaps", "scalar", "empty", "one"],
)
def test_memory_order_and_back(tensor):
    vector = in_memory_order(tensor)
    assert vector.dim() == 1
    assert torch.equal(in_layout_of(vector, tensor), tensor)


def test_memory_order_of_a_dense_tensor_is_no_copy():
    tensor = torch.arange(24.0).view(2, 3, 4).transpose(0, 2)
    assert in_memory_order(tensor).data_ptr() == tensor.data_ptr()
    assert in_memory_order(tensor).tolist() == list(range(24))


@pytest.mark.skipif(not native.available(), reason="not built")
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("scatter", [False, True])
def test_a_rank_reads_its_own_slice_where_it_lies(rank, world_size, scatter):
    """Sum a tensor that is a bucket by itself, from private memory, one node per rank."""
    generator = torch.Generator().manual_seed(7)
    values = [
        torch.randn(4096, generator=generator) * 10 ** (3 - leaf) for leaf in range(world_size)
    ]
    (bucket,) = plan([4096], [torch.float32], 1 << 20)
    nodes_by_rank = [[(each, each + 1)] for each in range(world_size)]
    cuts = [0, *range(1024, 1024 * world_size, 1024), 4096] if scatter else None
    kept = values[rank].clone()
    added = NativeAllReduce(
        native_backend(kept.device, kept.dtype, None),
        bucket, nodes_by_rank, world_size, rank, 1, cuts=cuts, scatter=scatter,
    )  # fmt: skip
    added.launch({(rank, rank + 1): [kept]})
    ((_, found),) = added.gather()
    mine = slice(cuts[rank], cuts[rank + 1]) if scatter else slice(None)
    expected = total({(n, n + 1): each for n, each in enumerate(values)}, world_size, torch.add)
    assert bits(found[mine]) == bits(expected[mine])
    assert bits(kept) == bits(values[rank])
