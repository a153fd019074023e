"""Blocking send and receive: a token goes once around the ring.

`recv` returns when the message is there; `send` when the tensor may be changed
again. Rank 0 sends first and receives last: if every rank began with `recv`,
all would wait for ever.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.examples.picture import begin, picture, start


def main(backend: str | None = None) -> str:
    """Pass a token on, adding one at every rank."""
    world = begin(backend)
    after, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    token = torch.zeros(1)
    if world.rank == 0:
        token += 1
        dist.send(token, dst=after)
        dist.recv(token, src=before)
    else:
        dist.recv(token, src=before)
        token += 1
        dist.send(token, dst=after)
    return picture("send, recv: once around the ring, adding one", token=token)


if __name__ == "__main__":
    start(main)
