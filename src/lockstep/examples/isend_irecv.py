"""Send and receive without blocking: neighbours exchange, all at the same time.

`isend` and `irecv` return at once with a request. Until its `wait` has returned
the tensor belongs to the request: one that is sent must not be written, one that
is received must not be read.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Give my number to the right neighbour and take the left one's."""
    world = begin(backend)
    right, left = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    mine = torch.full((1,), float(world.rank))
    theirs = torch.zeros(1)
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, theirs, left)]
    )
    # Work that needs neither `mine` nor `theirs` goes here.
    for request in requests:
        request.wait()
    return picture("isend, irecv: to the right", sent=mine, received=theirs)


if __name__ == "__main__":
    start(main)
