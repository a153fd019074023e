"""The reproducible all-reduce: against the tree in one process, bit for bit, on real processes."""

from functools import partial

import pytest
import torch

from lockstep.comm import backend as native
from lockstep.comm.bucket import plan
from lockstep.comm.make_all_reduce import make_all_reduce
from lockstep.comm.memory_format import in_layout_of
from lockstep.comm.native_all_reduce import NativeAllReduce, native_backend
from lockstep.comm.pair_all_reduce import PairAllReduce
from lockstep.comm.piecewise_all_reduce import PiecewiseAllReduce
from lockstep.comm.portable_all_reduce import PortableAllReduce
from lockstep.comm.reproducible_all_reduce import reproducible_all_reduce
from lockstep.kernel.norm import in_memory_order
from lockstep.kernel.tree import total
from tree_sums import NEGATIVE_ZERO, bits, expected_sums, leaf_values, sums_on_a_rank

BACKENDS = ("gloo", "lockstep") if native.available() else "gloo"


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


@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("absent", [True, False])
@pytest.mark.parametrize("piece_bytes", [64, 2500])
def test_pieces_of_a_bucket_have_the_bits_of_the_whole_bucket(absent, piece_bytes):
    make = partial(PiecewiseAllReduce, group=None, piece_bytes=piece_bytes)
    for leaves in (8, 3):
        whole, again = sums_on_a_rank(leaves, torch.float32, 1 << 20, absent)
        assert whole == again
        pieces = sums_on_a_rank(leaves, torch.float32, 1 << 20, absent, make=make)
        assert pieces == [whole, whole]


@pytest.mark.ranks(2, backend="gloo")
def test_a_large_bucket_needs_messages_for_few_pieces(rank, monkeypatch):
    (bucket,) = plan([5000, 3000], [torch.float32] * 2, 1 << 20)
    device = torch.device("cpu")
    nodes_by_rank = [[(0, 1)], [(1, 2)]]
    added = PiecewiseAllReduce(bucket, nodes_by_rank, 2, device, None, piece_bytes=1024)
    assert len(added._pieces) > 20
    launch = PortableAllReduce.launch
    on_their_way = []

    def count(self, *given):
        on_their_way.append(sum(piece._work is not None for piece in added._pieces))
        launch(self, *given)

    monkeypatch.setattr(PortableAllReduce, "launch", count)
    values = [torch.full((5000,), 1.0 + rank), torch.full((3000,), 3.0)]
    sums = dict(reproducible_all_reduce([added], {nodes_by_rank[rank][0]: values}))
    assert (sums[0].unique().item(), sums[1].unique().item()) == (3, 6)
    assert max(on_their_way) == 2
    assert not any("_received" in vars(piece) or "_rows" in vars(piece) for piece in added._pieces)


@pytest.mark.ranks(2, backend="gloo")
def test_two_ranks_with_a_node_each_add_where_the_gradients_are(rank):
    (bucket,) = plan([5], [torch.float32], 1 << 20)
    node = rank, rank + 1
    added = make_all_reduce(bucket, [[(0, 1)], [(1, 2)]], 2, torch.device("cpu"))
    assert type(added) is PairAllReduce
    value = added.destination(node, bucket.members[0]).fill_(1.0 + rank)
    ((_, found),) = reproducible_all_reduce([added], {node: [value]})
    assert found.data_ptr() == value.data_ptr()
    assert found.tolist() == [3.0] * 5


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
        bucket, nodes_by_rank, world_size, rank, cuts=cuts, scatter=scatter,
    )  # fmt: skip
    added.launch({(rank, rank + 1): [kept]})
    ((_, found),) = added.gather()
    mine = slice(cuts[rank], cuts[rank + 1]) if scatter else slice(None)
    expected = total({(n, n + 1): each for n, each in enumerate(values)}, world_size, torch.add)
    assert bits(found[mine]) == bits(expected[mine])
    assert bits(kept) == bits(values[rank])
