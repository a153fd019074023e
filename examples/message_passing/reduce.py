"""Reduce: one rank gets the sum over all ranks.

The tensors of the other ranks are undefined afterwards: do not use them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Sum a tensor over all ranks, on rank 0."""
    world = init(backend)
    tensor = torch.tensor([1.0, 2.0]) + 10 * world.rank
    before = tensor.clone()
    dist.reduce(tensor, dst=0)
    after = tensor if world.rank == 0 else "undefined"
    return print_table("reduce to rank 0", before=before, after=after)


if __name__ == "__main__":
    run_example(main)
