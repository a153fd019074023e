"""Barrier: nobody goes on before everybody has come.

It moves no data and is seldom needed: every collective that brings data from
all ranks waits for them already.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Come one after the other; leave after the last one came."""
    world = begin(backend)
    dist.barrier()
    time.sleep(0.02 * world.rank)
    came = time.monotonic()
    dist.barrier()
    left = time.monotonic()
    last = torch.tensor([came], dtype=torch.float64)
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    answer = "yes" if left >= last.item() else "no"
    return picture("barrier", left_after_the_last_came=answer)


if __name__ == "__main__":
    start(main)
