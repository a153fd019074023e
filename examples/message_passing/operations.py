"""Reduction operations: SUM, PRODUCT, MIN, MAX, AVG.

NCCL and Lockstep's backend support AVG; on other backends, divide the sum by the world size.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Reduce the same numbers with five operations."""
    world = init(backend)
    before = torch.tensor([float(world.rank + 1)])
    results = {}
    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        results[name] = before.clone()
        dist.all_reduce(results[name], op=getattr(dist.ReduceOp, name))
    results["AVG"] = average(before.clone(), world.world_size)
    return print_table("all_reduce with each operation", before=before, **results)


def average(tensor: torch.Tensor, world_size: int) -> torch.Tensor:
    """Average a tensor over the ranks, in place, on any backend."""
    if dist.get_backend() in ("nccl", "lockstep"):
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    else:
        dist.all_reduce(tensor)
        tensor /= world_size
    return tensor


if __name__ == "__main__":
    run_example(main)
