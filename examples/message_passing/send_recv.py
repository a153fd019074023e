"""Blocking send and receive: a token travels once around a ring of ranks.

`recv` returns when the message has arrived; `send` returns when the tensor may be
modified again. Rank 0 sends first and receives last: if every rank called `recv` first,
all of them would deadlock.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness import init, print_table, run_example


def main(backend: str | None = None) -> str:
    """Pass a token around the ring and add one on every rank."""
    world = init(backend)
    after = (world.rank + 1) % world.world_size
    before = (world.rank - 1) % world.world_size
    token = torch.zeros(1)
    if world.rank == 0:
        token += 1
        dist.send(token, dst=after)
        dist.recv(token, src=before)
    else:
        dist.recv(token, src=before)
        token += 1
        dist.send(token, dst=after)
    return print_table("send, recv: once around the ring, adding one", token=token)


if __name__ == "__main__":
    run_example(main)
