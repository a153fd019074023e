"""Barrier: no rank continues before every rank has reached the barrier.

A barrier moves no data and is rarely needed: a collective that reads data from all
ranks waits for them anyway.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Arrive one after the other; leave after the last rank has arrived."""
    world = init(backend)
    dist.barrier()
    time.sleep(0.02 * world.rank)
    arrived = time.monotonic()
    dist.barrier()
    left = time.monotonic()
    last = torch.tensor([arrived], dtype=torch.float64)
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    answer = "yes" if left >= last.item() else "no"
    return print_table("barrier", left_after_last_arrival=answer)


if __name__ == "__main__":
    run_example(main)
