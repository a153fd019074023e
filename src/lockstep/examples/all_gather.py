"""All-gather: everybody collects one tensor from each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Collect at every rank."""
    world = begin(backend)
    tensor = torch.full((1,), 10.0 * world.rank)
    pieces = [torch.zeros(1) for _ in range(world.world_size)]
    dist.all_gather(pieces, tensor)
    return picture("all_gather", before=tensor, after=pieces)


if __name__ == "__main__":
    start(main)
