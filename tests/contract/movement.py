"""Operations that move: broadcast, all_gather, gather, scatter, all_to_all, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from contract.check import Ledger, same
from contract.plain import MOVABLE, joined, name, written

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
NOWHERE = 9  # the rank of nobody: what lies in an output before


def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    return written(NOWHERE, count, dtype)


def broadcast(run: Ledger, sizes: Sequence[int]) -> None:
    for root in range(dist.get_world_size()):
        for dtype in MOVABLE:
            run(f"{name(dtype)} 5 from {root}", partial(one_broadcast, dtype, 5, root))
    for size in sizes:
        run(f"float32 {size} from 0", partial(one_broadcast, torch.float32, size, 0))


def one_broadcast(dtype: torch.dtype, size: int, root: int) -> None:
    tensor = written(dist.get_rank(), size, dtype)
    dist.broadcast(tensor, root)
    same(tensor, written(root, size, dtype), "tensor")


def all_gather(run: Ledger, sizes: Sequence[int]) -> None:
    for form in (into_list, into_single, into_rows):
        for dtype in MOVABLE:
            run(f"{form.__name__} {name(dtype)} 5", partial(form, dtype, 5))
        for size in sizes:
            run(f"{form.__name__} float32 {size}", partial(form, torch.float32, size))
    run("in_place float32 40", partial(gather_in_place, 40))
    for dtype in (torch.float32, torch.int8):
        run(f"uneven {name(dtype)}", partial(uneven_all_gather, dtype))


def into_list(dtype: torch.dtype, count: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    outputs = [empty(count, dtype) for _ in range(n)]
    dist.all_gather(outputs, written(rank, count, dtype))
    same(outputs, [written(r, count, dtype) for r in range(n)], "output")


def into_single(dtype: torch.dtype, count: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    output = empty(n * count, dtype)
    all_gather_single(output, written(rank, count, dtype))
    same(output, torch.cat([written(r, count, dtype) for r in range(n)]), "output")


def into_rows(dtype: torch.dtype, count: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    output = empty(n * count, dtype).view(n, count)
    all_gather_single(output, written(rank, count, dtype))
    same(output, torch.stack([written(r, count, dtype) for r in range(n)]), "output")


def gather_in_place(count: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    output = empty(n * count, torch.float32)
    mine = output[rank * count : (rank + 1) * count]
    mine.copy_(written(rank, count))
    all_gather_single(output, mine)
    same(output, torch.cat([written(r, count) for r in range(n)]), "output")


def uneven_all_gather(dtype: torch.dtype) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    outputs = [empty(2 + 3 * r, dtype) for r in range(n)]
    dist.all_gather(outputs, written(rank, 2 + 3 * rank, dtype))
    same(outputs, [written(r, 2 + 3 * r, dtype) for r in range(n)], "output")


def gather(run: Ledger, sizes: Sequence[int]) -> None:
    for root in range(dist.get_world_size()):
        for dtype in MOVABLE:
            run(f"{name(dtype)} 5 to {root}", partial(one_gather, dtype, 5, root))
    for size in sizes:
        run(f"float32 {size} to 0", partial(one_gather, torch.float32, size, 0))


def one_gather(dtype: torch.dtype, count: int, root: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    outputs = [empty(count, dtype) for _ in range(n)] if rank == root else None
    dist.gather(written(rank, count, dtype), outputs, root)
    if outputs is not None:
        same(outputs, [written(r, count, dtype) for r in range(n)], "output")


def scatter(run: Ledger, sizes: Sequence[int]) -> None:
    for root in range(dist.get_world_size()):
        for dtype in MOVABLE:
            run(f"{name(dtype)} 5 from {root}", partial(one_scatter, dtype, 5, root))
    for size in sizes:
        run(f"float32 {size} from 0", partial(one_scatter, torch.float32, size, 0))


def one_scatter(dtype: torch.dtype, count: int, root: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    send = [written(root, count, dtype, p) for p in range(n)] if rank == root else None
    output = empty(count, dtype)
    dist.scatter(output, send, root)
    same(output, written(root, count, dtype, rank), "output")


def all_to_all(run: Ledger, sizes: Sequence[int]) -> None:
    for form in (exchange_single, exchange_lists):
        for dtype in MOVABLE:
            run(f"{form.__name__} {name(dtype)} 5", partial(form, dtype, 5))
        for size in sizes:
            run(f"{form.__name__} float32 {size}", partial(form, torch.float32, size))
    for form in (uneven_single, uneven_lists):
        for dtype in (torch.float32, torch.uint8, torch.complex128):
            run(f"{form.__name__} {name(dtype)}", partial(form, dtype, 3))
        run(f"{form.__name__} float32 with nothing for some", partial(form, torch.float32, 0))


def exchange_single(dtype: torch.dtype, count: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    send = joined([written(rank, count, dtype, p) for p in range(n)])
    output = empty(n * count, dtype)
    dist.all_to_all_single(output, send)
    same(output, torch.cat([written(r, count, dtype, rank) for r in range(n)]), "output")


def exchange_lists(dtype: torch.dtype, count: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    outputs = [empty(count, dtype) for _ in range(n)]
    dist.all_to_all(outputs, [written(rank, count, dtype, p) for p in range(n)])
    same(outputs, [written(r, count, dtype, rank) for r in range(n)], "output")


def length(source: int, destination: int, least: int) -> int:
    """Return how much `source` has for `destination`: another number for every pair."""
    return least + 3 * source + destination


def uneven_single(dtype: torch.dtype, least: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    sends = [written(rank, length(rank, p, least), dtype, p) for p in range(n)]
    wanted = [written(r, length(r, rank, least), dtype, rank) for r in range(n)]
    output = empty(sum(map(len, wanted)), dtype)
    dist.all_to_all_single(output, joined(sends), [*map(len, wanted)], [*map(len, sends)])
    same(output, torch.cat(wanted), "output")


def uneven_lists(dtype: torch.dtype, least: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    wanted = [written(r, length(r, rank, least), dtype, rank) for r in range(n)]
    outputs = [empty(len(one), dtype) for one in wanted]
    dist.all_to_all(outputs, [written(rank, length(rank, p, least), dtype, p) for p in range(n)])
    same(outputs, wanted, "output")


def barrier(run: Ledger, sizes: Sequence[int]) -> None:
    run("waits for all", partial(one_barrier, "barrier", False))
    run("waits for all, asynchronous", partial(one_barrier, "async", True))
    run("often", lambda: [dist.barrier() for _ in range(50)] and None)


def one_barrier(key: str, is_async: bool) -> None:
    """Count the ranks that came in the store, which every rank reads after the barrier."""
    store = c10d._get_default_store()
    store.add(f"contract/{key}", 1)
    work = dist.barrier(async_op=is_async)
    if work is not None:
        work.wait()
    same(store.add(f"contract/{key}", 0), dist.get_world_size(), "ranks that came")
