"""Train on two devices, by one process per device and by one process for both.

    python examples/data_parallel.py

Both use the same loop on handwritten digits, with two CPU devices. They print the same digest,
because they add the same two gradients in every step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import lockstep as ls
from lockstep.data.datasets import digits

DEVICES = 2
STEPS = 30
BATCH = 64


def build() -> nn.Module:
    """Return the model, with the same weights in every process."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 10 * 10, 10),
    )


def read_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of images and labels."""
    loader = DataLoader(digits(), BATCH, drop_last=True)
    while True:
        yield from loader


def train_in_processes() -> tuple[str, float]:
    """Train on this rank: one device, and this rank's half of every batch."""
    world = ls.init()
    model = DistributedDataParallel(build())
    exact = ls.exact(model, microbatches=DEVICES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_function = nn.CrossEntropyLoss()
    begin = time.perf_counter()
    for _, (images, labels) in zip(range(STEPS), read_batches(), strict=False):
        inputs, targets = (half.chunk(DEVICES)[world.rank] for half in (images, labels))
        optimizer.zero_grad()
        exact.begin()  # since this script divides the batch by itself
        exact.weigh(loss_function(model(inputs), targets)).backward()
        optimizer.step()
    return ls.digest(model.module), time.perf_counter() - begin


def train_in_one_process() -> tuple[str, float]:
    """Train in this process: two devices, and whole batches."""
    model = ls.DataParallel(build(), ["cpu"] * DEVICES, microbatches=DEVICES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_function = nn.CrossEntropyLoss()
    begin = time.perf_counter()
    for _, (images, labels) in zip(range(STEPS), read_batches(), strict=False):
        optimizer.zero_grad()
        model.compute_loss(loss_function, images, labels).backward()
        optimizer.step()
    return ls.digest(model.module), time.perf_counter() - begin


def main() -> None:
    """Train both ways, and print the digests and the times."""
    ls.init()  # on CPUs: bits for any number of threads
    outcomes = {
        "2 processes, 1 device each": ls.launch(train_in_processes, nprocs=DEVICES)[0],
        "1 process, 2 devices": train_in_one_process(),
    }
    for name, (digest, seconds) in outcomes.items():
        print(f"{name:28} digest {digest}  {STEPS} steps in {seconds:.2f} s")


if __name__ == "__main__":
    main()
