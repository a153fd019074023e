"""Tags tell messages apart; a receiver may also take one from anybody.

Two messages from one rank with different tags may be received in another order
than they were sent. `recv` without `src` takes the first that comes and returns
who sent it. Gloo and MPI have both; NCCL has neither.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start

LOSS, NORM = 1, 2


def main(backend: str | None = None) -> str:
    """Report two numbers from every rank to rank 0, which asks for the second kind first."""
    world = begin(backend)
    losses, norms = torch.zeros(world.world_size), torch.zeros(world.world_size)
    if world.rank == 0:
        for report, tag in ((norms, NORM), (losses, LOSS)):
            for _ in range(1, world.world_size):
                number = torch.zeros(1)
                sender = dist.recv(number, tag=tag)  # from any source
                report[sender] = number
    else:
        requests = [
            dist.isend(torch.full((1,), world.rank * scale), dst=0, tag=tag)
            for tag, scale in ((LOSS, 1.0), (NORM, 10.0))
        ]
        for request in requests:
            assert request is not None
            request.wait()
    return picture("tags: losses and norms, by sender, at rank 0", loss=losses, norm=norms)


if __name__ == "__main__":
    start(main)
