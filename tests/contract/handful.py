"""Each kind of operation once, short and long, on any group object: for many ranks, or threads.

The calls are c10d's own methods, which process groups and the backends below them
share, so that no world is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from contract.check import same
from contract.plain import reduced, written

SIZES = (17, 70_001)  # elements of float32


def handful(group: Any, rank: int, n: int) -> list[str]:
    """Run every operation as rank `rank` of `n`; return their names, and raise what is wrong."""
    operations: tuple[Callable[[Any, int, int, int], None], ...] = (
        all_reduce, reduce, broadcast, all_gather, gather, scatter, reduce_scatter,
        all_to_all, ring,
    )  # fmt: skip
    names = []
    for operation in operations:
        for size in SIZES:
            operation(group, rank, n, size)
            names.append(f"{operation.__name__} {size}")
    group.barrier(c10d.BarrierOptions()).wait()
    return names


def of(rank: int, size: int, part: int = 0) -> torch.Tensor:
    return written(rank, size, torch.float32, part)


def total(n: int, size: int, part: int = 0) -> torch.Tensor:
    return reduced("SUM", [of(rank, size, part) for rank in range(n)])


def all_reduce(group: Any, rank: int, n: int, size: int) -> None:
    tensor = of(rank, size)
    group.allreduce([tensor], c10d.AllreduceOptions()).wait()
    same(tensor, total(n, size), "all_reduce")


def reduce(group: Any, rank: int, n: int, size: int) -> None:
    options = c10d.ReduceOptions()
    options.rootRank = n - 1
    tensor = of(rank, size)
    group.reduce([tensor], options).wait()
    if rank == n - 1:
        same(tensor, total(n, size), "reduce")


def broadcast(group: Any, rank: int, n: int, size: int) -> None:
    options = c10d.BroadcastOptions()
    options.rootRank = n - 1
    tensor = of(rank, size)
    group.broadcast([tensor], options).wait()
    same(tensor, of(n - 1, size), "broadcast")


def all_gather(group: Any, rank: int, n: int, size: int) -> None:
    outputs = [torch.empty(size) for _ in range(n)]
    group.allgather([outputs], [of(rank, size)], c10d.AllgatherOptions()).wait()
    same(outputs, [of(r, size) for r in range(n)], "all_gather")


def gather(group: Any, rank: int, n: int, size: int) -> None:
    options = c10d.GatherOptions()
    options.rootRank = n // 2
    outputs = [torch.empty(size) for _ in range(n)]
    group.gather([outputs] if rank == n // 2 else [], [of(rank, size)], options).wait()
    if rank == n // 2:
        same(outputs, [of(r, size) for r in range(n)], "gather")


def scatter(group: Any, rank: int, n: int, size: int) -> None:
    options = c10d.ScatterOptions()
    options.rootRank = n // 2
    output = torch.empty(size)
    inputs = [[of(r, size) for r in range(n)]] if rank == n // 2 else []
    group.scatter([output], inputs, options).wait()
    same(output, of(rank, size), "scatter")


def reduce_scatter(group: Any, rank: int, n: int, size: int) -> None:
    output = torch.empty(size)
    inputs = [of(rank, size, part) for part in range(n)]
    group.reduce_scatter([output], [inputs], c10d.ReduceScatterOptions()).wait()
    same(output, total(n, size, rank), "reduce_scatter")


def all_to_all(group: Any, rank: int, n: int, size: int) -> None:
    """Send (s + d) % 3 blocks from s to d, some of them none."""
    size = size // n + 1

    def blocks(source: int, target: int) -> int:
        return (source + target) % 3 * size

    sent = torch.cat([of(rank, blocks(rank, target), target) for target in range(n)])
    widths = [blocks(source, rank) for source in range(n)]
    output = torch.empty(sum(widths))
    given = [blocks(rank, target) for target in range(n)]
    group.alltoall_base(output, sent, widths, given, c10d.AllToAllOptions()).wait()
    expected = torch.cat([of(source, blocks(source, rank), rank) for source in range(n)])
    same(output, expected, "all_to_all")


def ring(group: Any, rank: int, n: int, size: int) -> None:
    got = torch.empty(size)
    sent = group.send([of(rank, size)], (rank + 1) % n, 3)
    group.recv([got], (rank - 1) % n, 3).wait()
    sent.wait()
    same(got, of((rank - 1) % n, size), "message")
