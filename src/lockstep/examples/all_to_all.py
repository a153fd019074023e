"""All-to-all: every rank has a piece for every other: a transpose."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Exchange pieces between all pairs of ranks."""
    world = begin(backend)
    before = 10.0 * world.rank + torch.arange(float(world.world_size))
    after = torch.zeros(world.world_size)
    dist.all_to_all_single(after, before)
    return picture("all_to_all", before=before, after=after)


if __name__ == "__main__":
    start(main)
