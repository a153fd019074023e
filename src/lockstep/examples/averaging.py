"""Averaging gradients by hand, in ten lines, beside `lockstep.DistributedDataParallel`.

Every rank computes the gradient of its own samples. Divided by the number of
ranks and summed they are the gradient of all samples, as one process would have
it. `DistributedDataParallel` does the same, in buckets, while backward still runs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.examples.picture import begin, picture, start


def average_gradients(module: torch.nn.Module) -> None:
    """Replace every gradient by its mean over the ranks: after backward, before the step."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def gradient(module: torch.nn.Module, rank: int) -> torch.Tensor:
    """Return the gradient of this rank's one sample."""
    module(torch.full((1, 2), float(rank + 1))).sum().backward()
    weight = next(module.parameters())
    assert weight.grad is not None
    return weight.grad


def main(backend: str | None = None) -> str:
    """Average in both ways."""
    world = begin(backend)
    by_hand = torch.nn.Linear(2, 1, bias=False)
    own = gradient(by_hand, world.rank).clone()
    average_gradients(by_hand)
    wrapped = gradient(ls.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False)), world.rank)
    return picture(
        "averaging gradients",
        own=own,
        by_hand=next(by_hand.parameters()).grad,
        DistributedDataParallel=wrapped,
    )


if __name__ == "__main__":
    start(main)
