"""Sums that round: near the true sum, the same bits on every rank and from run to run.

A backend that guarantees the tree adds rank r as leaf r of the tree;
16-bit floats are added in float32 and rounded once, at the end.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from contract import reduction
from contract.check import Ledger, Wrong, same
from contract.plain import FLOATS, name

from lockstep.kernel.tree import total  # isort: skip


def rounding(run: Ledger, sizes: Sequence[int], guarantees_tree: bool) -> None:
    for dtype in FLOATS:
        for size in (17, *sizes):
            case = f"{name(dtype)} {size}"
            run(f"near {case}", partial(near, dtype, size))
            if guarantees_tree:
                run(f"tree {case}", partial(along_the_tree, dtype, size))
    for size in sizes[-2:]:
        if guarantees_tree:
            run(f"tree reduce_scatter {size}", partial(scattered_along_the_tree, size))


def random_values(rank: int, count: int, dtype: torch.dtype, part: int = 0) -> torch.Tensor:
    """Return values of very different sizes, so that every order of adding has other bits."""
    return _random_values(rank, count, part).to(dtype, copy=True)


@functools.cache
def _random_values(rank: int, count: int, part: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1000 * count + 10 * rank + part)
    values = torch.randn(count, generator=dice, dtype=torch.float64)
    return values * 4.0 ** torch.randint(-3, 4, (count,), generator=dice)


def everybody(count: int, dtype: torch.dtype, part: int = 0) -> list[torch.Tensor]:
    return [random_values(r, count, dtype, part) for r in range(dist.get_world_size())]


def near(dtype: torch.dtype, count: int) -> None:
    tensor = random_values(dist.get_rank(), count, dtype)
    dist.all_reduce(tensor)
    leaves = torch.stack([leaf.double() for leaf in everybody(count, dtype)])
    error = (tensor.double() - leaves.sum(0)).abs()
    bound = len(leaves) * torch.finfo(dtype).eps * leaves.abs().sum(0) + 1e-300
    if (error > bound).any():
        raise Wrong(f"{int((error > bound).sum())} of {count} sums are farther off than rounding")


def tree_sum(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = leaves[0].dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    nodes = {(rank, rank + 1): leaf.to(wide) for rank, leaf in enumerate(leaves)}
    return total(nodes, len(leaves), torch.add).to(dtype)


def along_the_tree(dtype: torch.dtype, count: int) -> None:
    for _ in range(2):
        tensor = random_values(dist.get_rank(), count, dtype)
        dist.all_reduce(tensor)
        same(tensor, tree_sum(everybody(count, dtype)), "bits")


def scattered_along_the_tree(count: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    output = torch.zeros(count)
    send = torch.cat([random_values(rank, count, torch.float32, part) for part in range(n)])
    reduction.reduce_scatter_single(output, send)
    same(output, tree_sum(everybody(count, torch.float32, rank)), "bits")


def digest(count: int = 5000) -> str:
    """Return a digest of sums that round, to compare between ranks and launches."""
    found = hashlib.sha256()
    for dtype in FLOATS:
        tensor = random_values(dist.get_rank(), count, dtype)
        dist.all_reduce(tensor)
        found.update(bytes(tensor.view(torch.uint8).tolist()))
    return found.hexdigest()
