"""Gather: rank 0 collects one tensor from each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Collect at rank 0; the other ranks give no list."""
    world = begin(backend)
    tensor = torch.full((1,), 10.0 * world.rank)
    pieces = None
    if world.rank == 0:
        pieces = [torch.zeros(1) for _ in range(world.world_size)]
    dist.gather(tensor, pieces, dst=0)
    return picture("gather at rank 0", before=tensor, after=pieces)


if __name__ == "__main__":
    start(main)
