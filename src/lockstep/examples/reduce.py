"""Reduce: one rank gets the sum of all.

What the other ranks' tensors hold afterwards is not defined: do not use it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Sum at rank 0."""
    world = begin(backend)
    tensor = torch.tensor([1.0, 2.0]) + 10 * world.rank
    before = tensor.clone()
    dist.reduce(tensor, dst=0)
    after = tensor if world.rank == 0 else "undefined"
    return picture("reduce to rank 0", before=before, after=after)


if __name__ == "__main__":
    start(main)
