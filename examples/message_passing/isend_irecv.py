"""Non-blocking send and receive: all neighbours exchange at the same time.

`isend` and `irecv` return a request immediately. Until its `wait()` has returned, do not
write to a tensor that is being sent, and do not read one that is being received.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Send this rank's number to the right neighbour and receive the left one's."""
    world = init(backend)
    right = (world.rank + 1) % world.world_size
    left = (world.rank - 1) % world.world_size
    outgoing = torch.full((1,), float(world.rank))
    incoming = torch.zeros(1)
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, outgoing, right), dist.P2POp(dist.irecv, incoming, left)]
    )
    # Work that uses neither `outgoing` nor `incoming` goes here.
    for request in requests:
        request.wait()
    return print_table("isend, irecv: to the right", sent=outgoing, received=incoming)


if __name__ == "__main__":
    run_example(main)
