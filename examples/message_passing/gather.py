"""Gather: rank 0 collects one tensor from each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Gather one tensor per rank on rank 0; the other ranks pass no list."""
    world = init(backend)
    tensor = torch.full((1,), 10.0 * world.rank)
    pieces = None
    if world.rank == 0:
        pieces = [torch.zeros(1) for _ in range(world.world_size)]
    dist.gather(tensor, pieces, dst=0)
    return print_table("gather at rank 0", before=tensor, after=pieces)


if __name__ == "__main__":
    run_example(main)
