"""The reproducible all-reduce across simulated hosts: the tree, bit for bit, for any placement."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import backend as native
from lockstep.comm.bucket import plan
from lockstep.comm.hosts import reduction_plan
from lockstep.comm.hosts.all_reduce import HostAllReduce
from lockstep.comm.hosts.bucket_fingerprint import FINGERPRINT_TAG, CollectiveFingerprint
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


def check_sums(group, dtype, leaves, has_absent, scatter=False):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    values = leaf_values(leaves, dtype, has_absent)
    expected = total({(n, n + 1): values[n] for n in range(leaves)}, leaves, add_rows)
    owned = split_evenly(leaves, ranks)
    fold = TreeAccumulator(leaves, add_rows)
    for leaf in owned[rank]:
        fold.put((leaf, leaf + 1), values[leaf])
    nodes_by_rank = [nodes_of(each, leaves) for each in owned]
    sizes = [each.numel() for each in expected]
    for bucket in plan(sizes, [dtype] * len(sizes), 4096):
        line = 64 // dtype.itemsize
        cuts = [min(n * line, bucket.length) for n in range(ranks)] + [bucket.length]
        sums = HostAllReduce(
            group, bucket, nodes_by_rank, leaves, cuts if scatter else None, scatter
        )
        for _ in range(2):  # the buffers are used again
            sums.launch(fold.nodes)
            found = dict(sums.gather())
            for member in bucket.members:
                lo, hi = 0, member.numel
                if scatter:
                    lo = min(max(cuts[rank] - member.offset, 0), hi)
                    hi = min(max(cuts[rank + 1] - member.offset, 0), hi)
                one, other = found[member.index], expected[member.index]
                assert bits(one[lo:hi]) == bits(other[lo:hi])


@pytest.mark.ranks(2, 3, 4, backend="gloo")
def test_the_sum_across_hosts_is_the_tree_bit_for_bit(world_size, monkeypatch):
    monkeypatch.setattr(reduction_plan, "CHUNK_BYTES", 2048)
    monkeypatch.setattr(reduction_plan, "LEAST_MESSAGE_BYTES", 64)
    for hosts in PLACEMENTS[world_size]:
        with simulated_hosts(hosts) as group:
            for leaves in (8, 7, 2):
                check_sums(group, torch.float32, leaves, has_absent=True)
            for dtype in (torch.bfloat16, torch.float16, torch.float64):
                check_sums(group, dtype, 8, has_absent=True)
            check_sums(group, torch.float32, 8, has_absent=False)
            check_sums(group, torch.float32, 8, has_absent=False, scatter=True)


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("hosts", [((0,), (1, 2)), ((0, 1), (2,))])
def test_ranks_that_add_different_buckets_all_say_so(rank, hosts):
    """Whether a rank on the same host or on another one differs: the last rank does."""
    with simulated_hosts(hosts) as group:
        sizes = [3, 4] if rank < 2 else [4, 3]
        (bucket,) = plan(sizes, [torch.float32] * 2, 1 << 20)
        nodes = [[(n, n + 1)] for n in range(3)]
        sums = HostAllReduce(group, bucket, nodes, 3)
        sums.launch({(rank, rank + 1): [torch.ones(size) for size in sizes]})
        with pytest.raises(RuntimeError, match=r"disagree.*reproducible_all_reduce\(float32, "):
            sums.gather()


def test_different_sums_have_different_tags():
    one = CollectiveFingerprint(1, 4, b"12345678", "float32")
    others = [replace(one, **changed) for changed in (
        {"number": 2}, {"count": 5}, {"digest": b"87654321"}, {"dtype": "float64"},
    )]  # fmt: skip
    tags = [tag for fingerprint in (one, *others) for tag in fingerprint.tags]
    assert len(set(tags)) == len(tags)
    assert min(tags) > FINGERPRINT_TAG
    assert max(tags) < (1 << 31) - 2  # what Gloo takes, below the tags of the group itself
    assert CollectiveFingerprint.unpack(one.pack()) == one
