"""What a reduction may compute: SUM, PRODUCT, MIN, MAX, AVG.

AVG is NCCL's; where a backend has none, it is a sum divided afterwards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Reduce the same numbers in five ways."""
    world = begin(backend)
    before = torch.tensor([float(world.rank + 1)])
    results = {}
    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        results[name] = before.clone()
        dist.all_reduce(results[name], op=getattr(dist.ReduceOp, name))
    results["AVG"] = average(before.clone(), world.world_size)
    return picture("all_reduce with each operation", before=before, **results)


def average(tensor: torch.Tensor, world_size: int) -> torch.Tensor:
    """Average over the ranks, in place, on any backend."""
    if dist.get_backend() == "nccl":
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    else:
        dist.all_reduce(tensor)
        tensor /= world_size
    return tensor


if __name__ == "__main__":
    start(main)
