"""Tags distinguish messages, and `recv` can accept a message from any rank.

Messages with different tags may be received in a different order than they were sent.
`recv` without `src` takes the first message that arrives and returns the rank of its
sender. Gloo, MPI and Lockstep's backend support both; NCCL supports neither.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example

LOSS = 1
NORM = 2


def main(backend: str | None = None) -> str:
    """Send two numbers from every rank to rank 0, which receives the second kind first."""
    world = init(backend)
    losses = torch.zeros(world.world_size)
    norms = torch.zeros(world.world_size)
    if world.rank == 0:
        for values, tag in ((norms, NORM), (losses, LOSS)):
            for _ in range(1, world.world_size):
                number = torch.zeros(1)
                sender = dist.recv(number, tag=tag)  # from any source
                values[sender] = number
    else:
        requests = [
            dist.isend(torch.full((1,), world.rank * scale), dst=0, tag=tag)
            for tag, scale in ((LOSS, 1.0), (NORM, 10.0))
        ]
        for request in requests:
            assert request is not None
            request.wait()
    return print_table("tags: losses and norms, by sender, at rank 0", loss=losses, norm=norms)


if __name__ == "__main__":
    run_example(main)
