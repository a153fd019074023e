"""An asynchronous collective: the sum is made while this rank computes.

`async_op=True` returns a handle at once. Until `wait` has returned, the tensor
belongs to the collective: neither read nor write it. All ranks must call their
collectives in the same order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Sum a tensor while a product of matrices is computed."""
    world = begin(backend)
    tensor = torch.full((1 << 20,), float(world.rank))
    before = tensor[:1].clone()
    handle = dist.all_reduce(tensor, async_op=True)
    matrix = torch.eye(256) @ torch.full((256, 256), 2.0)  # needs nothing of `tensor`
    assert handle is not None
    handle.wait()
    return picture(
        "all_reduce, asynchronous", before=before, computed=matrix[0, :1], after=tensor[:1]
    )


if __name__ == "__main__":
    start(main)
