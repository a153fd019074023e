"""A small training on any backend: the digest of the Trainer, and DistributedDataParallel."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

import lockstep as ls


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def digest() -> str:
    """Train with the Trainer; return the digest of the weights."""
    generator = torch.Generator().manual_seed(5)
    inputs, labels = torch.randn(24, 6, generator=generator), torch.arange(24) % 3
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    trainer = ls.Trainer(network(), torch.nn.CrossEntropyLoss(), optimizer, microbatches=4)
    data = torch.utils.data.TensorDataset(inputs, labels)
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(batch)
    return trainer.digest()


def gradients() -> list[object]:
    """Return the gradients of DistributedDataParallel, which waits for futures of buckets."""
    model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=1e-4)
    model(torch.full((2, 6), float(dist.get_rank() + 1))).square().sum().backward()
    return [parameter.grad.tolist() for parameter in model.parameters()]


def train(backend: str) -> tuple[str, list[object]]:
    ls.init(backend=backend, timeout=60)
    found = digest(), gradients() if ls.world_size() > 1 else []
    ls.shutdown()
    return found
