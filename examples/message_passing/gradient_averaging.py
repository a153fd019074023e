"""Average gradients by hand, and compare with torch's `DistributedDataParallel`.

Every rank computes the gradient of its own samples. The mean of these gradients is the
gradient of the whole batch. `DistributedDataParallel` computes the same in buckets,
during the backward pass.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import init, print_table, run_example


def average_gradients(module: torch.nn.Module) -> None:
    """Average every gradient over the ranks; call it between backward and the optimizer step."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def compute_gradient(module: torch.nn.Module, rank: int) -> torch.Tensor:
    """Return the gradient of this rank's only sample."""
    module(torch.full((1, 2), float(rank + 1))).sum().backward()
    weight = next(module.parameters())
    assert weight.grad is not None
    return weight.grad


def main(backend: str | None = None) -> str:
    """Average by hand and with `DistributedDataParallel`."""
    world = init(backend)
    by_hand = torch.nn.Linear(2, 1, bias=False)
    own = compute_gradient(by_hand, world.rank).clone()
    average_gradients(by_hand)
    wrapped = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    return print_table(
        "averaging gradients",
        own=own,
        by_hand=next(by_hand.parameters()).grad,
        DistributedDataParallel=compute_gradient(wrapped, world.rank),
    )


if __name__ == "__main__":
    run_example(main)
