"""All-reduce: every rank gets the sum over all ranks, as in data-parallel training."""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Sum a tensor over all ranks, on every rank."""
    world = init(backend)
    tensor = torch.tensor([1.0, 2.0]) + 10 * world.rank
    before = tensor.clone()
    dist.all_reduce(tensor)
    return print_table("all_reduce", before=before, after=tensor)


if __name__ == "__main__":
    run_example(main)
