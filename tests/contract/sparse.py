"""Sums of sparse tensors over the ranks: coalesced, and equal to the sums of the dense tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from contract.check import Ledger, refused, same
from contract.plain import name, reduced, written

SHAPES = {"rows": (7, 3), "vector": (9,), "two dimensions": (4, 5, 2)}
SPARSE_DIMENSIONS = {"rows": 1, "vector": 1, "two dimensions": 2}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.int64)


def sparse(run: Ledger, sizes: Sequence[int]) -> None:
    for kind in SHAPES:
        for dtype in DTYPES:
            run(f"SUM {name(dtype)} {kind}", partial(one_sum, kind, dtype))
    run("SUM of nothing on some ranks", nothing_on_some)
    run("SUM of nothing", nothing)
    run("SUM of many rows", many)
    run("SUM asynchronous, by future", by_future)
    run("SUM of two tensors per rank", two_per_rank)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        run(f"{op} refused", partial(other_reduction, op))
    # One rank alone adds nothing.
    for dtype in (torch.float16, torch.bool, torch.int16) if dist.get_world_size() > 1 else ():
        run(f"SUM {name(dtype)} refused", partial(other_dtype, dtype))


def on_rank(rank: int, kind: str, dtype: torch.dtype, part: int = 0) -> torch.Tensor:
    """Return entries of `rank`: one of its own, one of all ranks, and one of those twice."""
    shape = SHAPES[kind]
    dimensions = SPARSE_DIMENSIONS[kind]
    rows = torch.tensor([rank % shape[0], shape[0] - 1, shape[0] - 1, part])
    where = torch.stack([rows] + [torch.full((4,), 1)] * (dimensions - 1))
    values = written(rank, (4, *shape[dimensions:]), dtype, part)
    return torch.sparse_coo_tensor(where, values, shape, check_invariants=True)


def everybody(kind: str, dtype: torch.dtype, part: int = 0) -> list[torch.Tensor]:
    return [on_rank(r, kind, dtype, part) for r in range(dist.get_world_size())]


def same_sum(got: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Compare with the parts as Gloo gives their sum: one entry for each that some part has."""
    places = torch.cat([part.coalesce().indices() for part in parts], dim=1).unique(dim=1)
    same(got.is_coalesced(), True, "coalesced")
    same(got.indices(), places, "indices")
    same(got.to_dense(), reduced("SUM", [part.to_dense() for part in parts]), "sum")


def one_sum(kind: str, dtype: torch.dtype) -> None:
    tensor = on_rank(dist.get_rank(), kind, dtype)
    dist.all_reduce(tensor)
    same_sum(tensor, everybody(kind, dtype))


def empty(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    where = torch.empty(1, 0, dtype=torch.int64)
    values = torch.empty(0, 3, dtype=dtype)
    return torch.sparse_coo_tensor(where, values, SHAPES["rows"], check_invariants=True)


def nothing_on_some() -> None:
    parts = everybody("rows", torch.float32)
    parts[0] = empty()
    tensor = parts[dist.get_rank()].clone()
    dist.all_reduce(tensor)
    same_sum(tensor, parts)


def nothing() -> None:
    tensor = empty()
    dist.all_reduce(tensor)
    same(tensor._nnz(), 0, "entries")


def many() -> None:
    """Use more rows than pass in one piece; each rank has every second or third of them."""
    ranks = range(dist.get_world_size())
    rows = [torch.arange(0, 4001, 2 + r % 2) for r in ranks]
    parts = [
        torch.sparse_coo_tensor(
            place[None], written(r, (len(place), 3)), (4001, 3), check_invariants=True
        )
        for r, place in enumerate(rows)
    ]
    tensor = parts[dist.get_rank()].clone()
    dist.all_reduce(tensor)
    same_sum(tensor, parts)


def by_future() -> None:
    tensor = on_rank(dist.get_rank(), "rows", torch.float32)
    work = dist.all_reduce(tensor, async_op=True)
    (value,) = work.get_future().wait()
    same_sum(value, everybody("rows", torch.float32))


def two_per_rank() -> None:
    group = dist.group.WORLD
    assert group is not None
    tensors = [on_rank(dist.get_rank(), "rows", torch.float32, part) for part in (0, 2)]
    group.allreduce(tensors).wait()
    parts = [each for part in (0, 2) for each in everybody("rows", torch.float32, part)]
    for tensor in tensors:
        same_sum(tensor, parts)


def other_reduction(op: dist.ReduceOp) -> None:
    tensor = on_rank(dist.get_rank(), "rows", torch.float32)
    refused(lambda: dist.all_reduce(tensor, op), "unsupported reduction operation", "layout")


def other_dtype(dtype: torch.dtype) -> None:
    """Add what torch has no kernels for; the group goes on."""
    tensor = on_rank(dist.get_rank(), "rows", dtype)
    refused(lambda: dist.all_reduce(tensor), "cadd_sparse", "scalar type")
    one_sum("rows", torch.float32)
