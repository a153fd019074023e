"""Process groups: the even ranks and the odd ranks each compute their own sum.

`new_group` is a collective over the whole world: every rank calls it for every group,
in the same order, including the groups it is not a member of.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Sum the rank numbers within two groups."""
    world = init(backend)
    ranks = range(world.world_size)
    halves = [dist.new_group([rank for rank in ranks if rank % 2 == odd]) for odd in (0, 1)]
    tensor = torch.full((1,), float(world.rank))
    before = tensor.clone()
    dist.all_reduce(tensor, group=halves[world.rank % 2])
    return print_table("groups: even and odd ranks add up", before=before, after=tensor)


if __name__ == "__main__":
    run_example(main)
