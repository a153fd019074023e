"""The reproducible all-reduce across simulated hosts: the tree, bit for bit, for any placement."""

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import backend as native
from lockstep.comm.bucket import plan
from lockstep.comm.hosts.all_reduce import HostAllReduce
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.tree import TreeAccumulator, nodes_of, total
from placed import simulated_hosts

pytestmark = pytest.mark.skipif(not native.available(), reason="not built")

PLACEMENTS = {
    2: [((0,), (1,))],
    3: [((0, 1), (2,)), ((0, 2), (1,)), ((0,), (1,), (2,))],
    4: [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0,), (1, 2), (3,))],
}
SIZES = [15, 0, 129, 120, 1, 1777]
NEGATIVE_ZERO = 4  # the tensor that is -0.0 in one leaf and absent in all others


def leaf_values(leaves, dtype, has_absent):
    generator = torch.Generator().manual_seed(leaves)
    found = []
    for leaf in range(leaves):
        row = []
        for number, size in enumerate(SIZES):
            value = torch.randn(size, generator=generator)
            value *= 10 ** torch.randint(-3, 4, (size,), generator=generator).float()
            is_absent = has_absent and (leaf + number) % 5 == 0
            row.append(None if is_absent else value.to(dtype))
        row[NEGATIVE_ZERO] = torch.tensor([-0.0], dtype=dtype) if leaf == 0 else None
        found.append(row if has_absent else row[:NEGATIVE_ZERO] + row[NEGATIVE_ZERO + 1 :])
    return found


def add(left, right):
    return left if right is None else right if left is None else left + right


def add_rows(left, right):
    return [add(*pair) for pair in zip(left, right, strict=True)]


def bits(tensor):
    return None if tensor is None else tensor.contiguous().view(torch.uint8).tolist()


def check_sums(group, dtype, leaves, has_absent):
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    values = leaf_values(leaves, dtype, has_absent)
    expected = total({(n, n + 1): values[n] for n in range(leaves)}, leaves, add_rows)
    owned = split_evenly(leaves, ranks)
    fold = TreeAccumulator(leaves, add_rows)
    for leaf in owned[rank]:
        fold.put((leaf, leaf + 1), values[leaf])
    nodes_by_rank = [nodes_of(each, leaves) for each in owned]
    sizes = [each.numel() for each in expected]
    for bucket in plan(sizes, [dtype] * len(sizes), 4096):
        sums = HostAllReduce(group, bucket, nodes_by_rank, leaves)
        for _ in range(2):  # the buffers are used again
            sums.launch(fold.nodes)
            found = dict(sums.gather())
            for member in bucket.members:
                assert bits(found[member.index]) == bits(expected[member.index])


@pytest.mark.ranks(2, 3, 4, backend="gloo")
def test_the_sum_across_hosts_is_the_tree_bit_for_bit(world_size):
    for hosts in PLACEMENTS[world_size]:
        with simulated_hosts(hosts) as group:
            for leaves in (8, 7, 2):
                check_sums(group, torch.float32, leaves, has_absent=True)
            for dtype in (torch.bfloat16, torch.float16, torch.float64):
                check_sums(group, dtype, 8, has_absent=True)
            check_sums(group, torch.float32, 8, has_absent=False)
            check_sums(group, torch.float32, 1, has_absent=False)  # some hosts have no gradient


@pytest.mark.ranks(3, backend="gloo")
def test_a_rank_that_adds_another_bucket_than_its_host_is_named_by_all(rank):
    with simulated_hosts(((0,), (1, 2))) as group:
        sizes = [3, 4] if rank < 2 else [4, 3]
        (bucket,) = plan(sizes, [torch.float32] * 2, 1 << 20)
        nodes = [[(n, n + 1)] for n in range(3)]
        sums = HostAllReduce(group, bucket, nodes, 3)
        sums.launch({(rank, rank + 1): [torch.ones(size) for size in sizes]})
        with pytest.raises(RuntimeError, match=r"disagree.*reproducible_all_reduce\(float32, "):
            sums.gather()
