"""Values of very different sizes, some absent, and their sums along the tree on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.comm.bucket import plan
from lockstep.comm.make_all_reduce import make_all_reduce
from lockstep.comm.memory_format import in_layout_of
from lockstep.comm.reproducible_all_reduce import reproducible_all_reduce
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.tree import TreeAccumulator, add_present, nodes_of, total

__all__ = ["NEGATIVE_ZERO", "bits", "expected_sums", "leaf_values", "sums_on_a_rank"]

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


def add_lists(left, right):
    return [add_present(*pair) for pair in zip(left, right, strict=True)]


def bits(tensor):
    return None if tensor is None else tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def expected_sums(values, leaves):
    def add(left, right):
        return left if right is None else right if left is None else left + right

    return [
        total({(leaf, leaf + 1): values[leaf][number] for leaf in range(leaves)}, leaves, add)
        for number in range(len(SHAPES))
    ]


def sums_on_a_rank(leaves, dtype, capacity, absent, device="cpu", make=make_all_reduce, **how):
    """Return the bits of every sum, twice, as this rank sees them; `how` as of make_all_reduce."""
    device = torch.device(device)
    group = how.get("group")
    owned = split_evenly(leaves, dist.get_world_size(group))
    values = leaf_values(leaves, dtype, absent)
    fold = TreeAccumulator(leaves, add_lists)
    for leaf in owned[dist.get_rank(group)]:
        copies = [None if v is None else v.to(device, copy=True) for v in values[leaf]]
        fold.put((leaf, leaf + 1), copies)
    nodes_by_rank = [nodes_of(each, leaves) for each in owned]
    buckets = plan([torch.Size(shape).numel() for shape in SHAPES], [dtype] * len(SHAPES), capacity)
    sums = [make(bucket, nodes_by_rank, leaves, device, **how) for bucket in buckets]
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
            row.append(None if vector is None else bits(in_layout_of(vector.cpu(), layout)))
        seen.append(row)
    return seen
