"""Groups: the even and the odd ranks add up among themselves.

Every rank takes part in making every group, also one it is not a member of: it
is a call of the whole world, in the same order everywhere.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Sum the ranks' numbers in two groups."""
    world = begin(backend)
    everybody = range(world.world_size)
    halves = [dist.new_group([rank for rank in everybody if rank % 2 == odd]) for odd in (0, 1)]
    tensor = torch.full((1,), float(world.rank))
    before = tensor.clone()
    dist.all_reduce(tensor, group=halves[world.rank % 2])
    return picture("groups: even and odd ranks add up", before=before, after=tensor)


if __name__ == "__main__":
    start(main)
