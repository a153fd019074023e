"""Reduce-scatter: the sum of all, of which every rank gets one piece.

Followed by an all-gather it is an all-reduce; sharded optimizers work between.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Sum one piece at every rank."""
    world = begin(backend)
    pieces = [torch.full((1,), 10.0 * world.rank + part) for part in range(world.world_size)]
    tensor = torch.zeros(1)
    dist.reduce_scatter(tensor, pieces)
    return picture("reduce_scatter", before=pieces, after=tensor)


if __name__ == "__main__":
    start(main)
