"""All-gather: every rank collects one tensor from each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Gather one tensor per rank, on every rank."""
    world = init(backend)
    tensor = torch.full((1,), 10.0 * world.rank)
    pieces = [torch.zeros(1) for _ in range(world.world_size)]
    dist.all_gather(pieces, tensor)
    return print_table("all_gather", before=tensor, after=pieces)


if __name__ == "__main__":
    run_example(main)
