"""Scatter: rank 0 has one tensor for each rank, and hands them out."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Hand out pieces of rank 0's list; the other ranks give none."""
    world = begin(backend)
    pieces = None
    if world.rank == 0:
        pieces = [torch.full((1,), 10.0 * rank) for rank in range(world.world_size)]
    tensor = torch.zeros(1)
    dist.scatter(tensor, pieces, src=0)
    return picture("scatter from rank 0", before=pieces, after=tensor)


if __name__ == "__main__":
    start(main)
