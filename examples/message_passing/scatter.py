"""Scatter: rank 0 sends one tensor to each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Distribute the list of rank 0; the other ranks pass no list."""
    world = init(backend)
    pieces = None
    if world.rank == 0:
        pieces = [torch.full((1,), 10.0 * rank) for rank in range(world.world_size)]
    tensor = torch.zeros(1)
    dist.scatter(tensor, pieces, src=0)
    return print_table("scatter from rank 0", before=pieces, after=tensor)


if __name__ == "__main__":
    run_example(main)
