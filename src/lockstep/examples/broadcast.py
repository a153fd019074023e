"""Broadcast: everybody gets what rank 1 has."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Send rank 1's tensor to all."""
    world = begin(backend)
    tensor = torch.tensor([1.0, 2.0]) + 10 * world.rank
    before = tensor.clone()
    dist.broadcast(tensor, src=1 % world.world_size)
    return picture("broadcast from rank 1", before=before, after=tensor)


if __name__ == "__main__":
    start(main)
