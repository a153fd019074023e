"""What is trained: a model that can be cut, its batches, and into how many micro-batches.

Inputs, targets and weights depend on nothing but the case, so that every
contender must come to the same losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from examples.resnet import resnet50
from examples.rpc_pipeline import CUT, SEED

__all__ = ["MODELS", "Batch", "Case", "Layers", "Model"]

WIDTH = 32  # of the tiny model
Batch = tuple[torch.Tensor, torch.Tensor]


class Layers(nn.Module):
    """Two linear layers, so small that only what is around them takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def blocks(self) -> list[nn.Module]:
        """Return the places to cut between."""
        return [self.first, self.second]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the scores of as many classes."""
        return self.second(self.first(inputs))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Model:
    """A model by name: `cut` blocks are its first stage; `seconds` are for 32 samples, about.

    `rate` is such that a second step on the same batch shows whether a quarter of a
    stage's gradient is missing, and rounding does not show.
    """

    name: str
    sentence: str
    build: Callable[[], nn.Module]
    cut: int
    classes: int
    pictures: bool
    seconds: float
    rate: float


MODELS = {
    "resnet50": Model(
        "resnet50", "ResNet-50, cut as the RPC tutorial does", resnet50, CUT, 1000, True, 4.0, 0.01
    ),
    "tiny": Model("tiny", "two linear layers of 32", Layers, 1, WIDTH, False, 1e-3, 1.0),
}


@dataclass(frozen=True)
class Case:
    """A model by name, `samples` per batch in `splits` micro-batches, images of `size` pixels."""

    model: str
    splits: int
    samples: int
    size: int

    @property
    def net(self) -> Model:
        """The model's description."""
        return MODELS[self.model]

    def build(self) -> nn.Module:
        """Return the model with weights that are always the same."""
        torch.manual_seed(SEED)
        return self.net.build()

    def optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        """Return the factory of the optimizer."""
        return partial(torch.optim.SGD, lr=self.net.rate)

    def batch(self, number: int) -> Batch:
        """Return a global batch."""
        generator = torch.Generator().manual_seed(number)
        shape = (3, self.size, self.size) if self.net.pictures else (WIDTH,)
        inputs = torch.randn(self.samples, *shape, generator=generator)
        return inputs, torch.randint(self.net.classes, (self.samples,), generator=generator)
