"""Operations that reduce: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from contract.check import Ledger, or_refused, refused, same
from contract.plain import (
    FACTOR,
    FLOAT8,
    OPS,
    REDUCIBLE,
    is_meaningless,
    is_optional,
    joined,
    name,
    reduced,
    tolerance,
    written,
)

LONG = 1031  # elements that pass in pieces where those are small, of any type
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def op_named(op: str) -> object:
    if op == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(FACTOR)
    return getattr(dist.ReduceOp, op)


def expected(op: str, count: int, dtype: torch.dtype, part: int = 0) -> torch.Tensor:
    return reduced(op, [written(r, count, dtype, part) for r in range(dist.get_world_size())])


def guarded(run: Ledger, case: str, op: str, dtype: torch.dtype, call: partial[None]) -> None:
    """Run a reduction that may have to be refused, or may be."""
    if is_meaningless(op, dtype):
        words = (op, name(dtype), "complex", "non-integral", "scalar type")
        run(f"{case} refused", partial(refused, call, *words))
    elif is_optional(op, dtype):
        run(case, partial(right_or_refused, call, op, dtype))
    else:
        run(case, call)


def right_or_refused(call: partial[None], op: str, dtype: torch.dtype) -> None:
    with or_refused(op, name(dtype), "scalar type", "can't be cast"):
        call()


def all_reduce(run: Ledger, sizes: Sequence[int]) -> None:
    # Types and operations take every route that the sizes below take.
    routes = (17, LONG) if run.small else (17,)
    for op in OPS:
        for dtype in (*REDUCIBLE, *FLOAT8):
            for size in routes:
                call = partial(one_all_reduce, op, dtype, size)
                guarded(run, f"{op} {name(dtype)} {size}", op, dtype, call)
    for size in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            run(f"SUM {name(dtype)} {size}", partial(one_all_reduce, "SUM", dtype, size))
    for op, dtype in (("AVG", torch.float32), ("MAX", torch.int64), ("BXOR", torch.uint8)):
        size = sizes[-1]
        run(f"{op} {name(dtype)} {size}", partial(one_all_reduce, op, dtype, size))


def one_all_reduce(op: str, dtype: torch.dtype, size: int) -> None:
    tensor = written(dist.get_rank(), size, dtype)
    dist.all_reduce(tensor, op_named(op))
    same(tensor, expected(op, size, dtype), "result", tolerance(op, dtype))


def reduce(run: Ledger, sizes: Sequence[int]) -> None:
    for root in range(dist.get_world_size()):
        for dtype in REDUCIBLE:
            run(f"SUM {name(dtype)} 5 to {root}", partial(one_reduce, "SUM", dtype, 5, root))
    for op in OPS:
        call = partial(one_reduce, op, torch.float32, 33, 0)
        guarded(run, f"{op} float32 33 to 0", op, torch.float32, call)
        call = partial(one_reduce, op, torch.int32, 33, 0)
        guarded(run, f"{op} int32 33 to 0", op, torch.int32, call)
    for size in sizes:
        run(f"SUM float32 {size} to 0", partial(one_reduce, "SUM", torch.float32, size, 0))


def one_reduce(op: str, dtype: torch.dtype, size: int, root: int) -> None:
    tensor = written(dist.get_rank(), size, dtype)
    dist.reduce(tensor, root, op_named(op))
    if dist.get_rank() == root:
        same(tensor, expected(op, size, dtype), "result", tolerance(op, dtype))


def reduce_scatter(run: Ledger, sizes: Sequence[int]) -> None:
    for form in (into_single, into_list):
        for dtype in REDUCIBLE:
            run(f"{form.__name__} SUM {name(dtype)} 6", partial(form, "SUM", dtype, 6))
        for op in OPS:
            for dtype in (torch.float32, torch.int32):
                call = partial(form, op, dtype, 9)
                guarded(run, f"{form.__name__} {op} {name(dtype)} 9", op, dtype, call)
        for size in sizes:
            run(f"{form.__name__} SUM float32 {size}", partial(form, "SUM", torch.float32, size))
    run("in_place SUM float32 40", partial(in_place, 40))
    run("uneven SUM float32", partial(uneven, torch.float32))
    run("uneven SUM int64", partial(uneven, torch.int64))


def into_single(op: str, dtype: torch.dtype, count: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    send = joined([written(rank, count, dtype, part) for part in range(n)])
    kept = send.clone()
    output = written(9, count, dtype)
    reduce_scatter_single(output, send, op_named(op))
    same(output, expected(op, count, dtype, rank), "output", tolerance(op, dtype))
    same(send, kept, "input afterwards")


def into_list(op: str, dtype: torch.dtype, count: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    send = [written(rank, count, dtype, p) for p in range(n)]
    output = written(9, count, dtype)
    dist.reduce_scatter(output, send, op_named(op))
    same(output, expected(op, count, dtype, rank), "output", tolerance(op, dtype))


def in_place(count: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    both = joined([written(rank, count, part=part) for part in range(n)])
    output = both[rank * count : (rank + 1) * count]
    reduce_scatter_single(output, both)
    same(output, expected("SUM", count, torch.float32, rank), "output")


def uneven(dtype: torch.dtype) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    send = [written(rank, 3 + 2 * part, dtype, part) for part in range(n)]
    output = written(9, 3 + 2 * rank, dtype)
    dist.reduce_scatter(output, send)
    same(output, expected("SUM", 3 + 2 * rank, dtype, rank), "output")
