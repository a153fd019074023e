"""What people bring to the Trainer from DistributedDataParallel: the same bits on 1, 2, 3 ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.kernel.errors import GradientError

SGD = partial(torch.optim.SGD, lr=0.1)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(8)
    return [
        (torch.randn(n, 7, generator=generator), torch.randint(0, 5, (n,), generator=generator))
        for n in (16, 11)
    ]


class Segments(nn.Module):
    """Dropout that reentrant checkpoints compute again; one layer in both and after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.shared, self.first, self.second = (nn.Linear(7, 7) for _ in range(3))
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(7, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.requires_grad_()
        for layer in (self.first, self.second):
            segment = nn.Sequential(self.shared, self.dropout, layer)
            hidden = checkpoint(segment, hidden, use_reentrant=True)
        return self.head(self.shared(hidden))


def plain() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 5))


def reentrant_checkpoints() -> str:
    trainer = ls.Trainer(Segments(), nn.CrossEntropyLoss(), SGD, max_grad_norm=0.5)
    for batch in batches():
        trainer.step(batch)
    return trainer.digest()


def a_penalty_of_the_gradient() -> str:
    """Double backward in a loop of one's own."""
    model, loss = plain(), nn.CrossEntropyLoss()
    trainer = ls.Trainer(model, None, SGD)
    for batch in batches():
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(batch):
                inputs.requires_grad_()
                value = loss(model(inputs), targets)
                (slope,) = torch.autograd.grad(value, inputs, create_graph=True)
                step.backward(value + slope.square().sum(dim=1).mean())
    return trainer.digest()


PROGRAMS: list[Callable[[], str]] = [reentrant_checkpoints, a_penalty_of_the_gradient]


def test_every_feature_gives_one_digest(ranks):
    def digests() -> list[str]:
        return [each() for each in PROGRAMS]

    found = [each for n in (1, 2, 3) for each in ranks(digests, n)]
    assert len(found) == 6
    assert all(each == found[0] for each in found)
    assert len(set(found[0])) == len(PROGRAMS)


class Table(nn.Module):
    """A module of the user's own whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 3))

    def forward(self, words):
        return nn.functional.embedding(words, self.weight, sparse=True)


def test_a_sparse_gradient_of_another_module_is_refused_by_name():
    ls.init()
    model = nn.Sequential(Table(), nn.Flatten(), nn.Linear(6, 5))
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD)
    words = torch.arange(16).view(8, 2) % 9
    with pytest.raises(GradientError, match=r"parameter 0\.weight has a sparse gradient"):
        trainer.step((words, torch.zeros(8, dtype=torch.int64)))
    ls.shutdown()
