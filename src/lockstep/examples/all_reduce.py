"""All-reduce: everybody gets the sum of all. What data-parallel training is made of."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Sum at every rank."""
    world = begin(backend)
    tensor = torch.tensor([1.0, 2.0]) + 10 * world.rank
    before = tensor.clone()
    dist.all_reduce(tensor)
    return picture("all_reduce", before=before, after=tensor)


if __name__ == "__main__":
    start(main)
