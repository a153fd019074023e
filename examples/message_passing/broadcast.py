"""Broadcast: every rank gets the tensor of rank 1."""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Copy rank 1's tensor to all ranks."""
    world = init(backend)
    tensor = torch.tensor([1.0, 2.0]) + 10 * world.rank
    before = tensor.clone()
    dist.broadcast(tensor, src=1 % world.world_size)
    return print_table("broadcast from rank 1", before=before, after=tensor)


if __name__ == "__main__":
    run_example(main)
