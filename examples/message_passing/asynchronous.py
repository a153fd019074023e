"""An asynchronous collective: the rank computes while the all-reduce runs.

`async_op=True` returns a handle immediately. Do not read or write the tensor before
`wait()` has returned. All ranks must call their collectives in the same order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Multiply two matrices while an all-reduce runs."""
    world = init(backend)
    tensor = torch.full((1 << 20,), float(world.rank))
    before = tensor[:1].clone()
    handle = dist.all_reduce(tensor, async_op=True)
    matrix = torch.eye(256) @ torch.full((256, 256), 2.0)  # does not use `tensor`
    assert handle is not None
    handle.wait()
    return print_table(
        "all_reduce, asynchronous", before=before, computed=matrix[0, :1], after=tensor[:1]
    )


if __name__ == "__main__":
    run_example(main)
