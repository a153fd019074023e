"""All-to-all: every rank sends a different piece to every rank, like a transpose."""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Exchange one element between every pair of ranks."""
    world = init(backend)
    before = 10.0 * world.rank + torch.arange(float(world.world_size))
    after = torch.zeros(world.world_size)
    dist.all_to_all_single(after, before)
    return print_table("all_to_all", before=before, after=after)


if __name__ == "__main__":
    run_example(main)
