"""Reduce-scatter: every rank gets one piece of the sum over all ranks.

A reduce-scatter followed by an all-gather is an all-reduce; sharded optimizers update
their shard in between.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Sum over all ranks; keep one piece per rank."""
    world = init(backend)
    pieces = [torch.full((1,), 10.0 * world.rank + part) for part in range(world.world_size)]
    tensor = torch.zeros(1)
    dist.reduce_scatter(tensor, pieces)
    return print_table("reduce_scatter", before=pieces, after=tensor)


if __name__ == "__main__":
    run_example(main)
