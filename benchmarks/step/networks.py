"""The models whose steps are measured, by size, and the data they are trained on.

All give scores of classes, take no random numbers, and are cut into blocks that
FullyShardedDataParallel shards one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from examples.resnet import resnet50
from lockstep.kernel.errors import UsageError

__all__ = ["NETWORKS", "OPTIMIZERS", "Network", "blocks", "chosen", "count"]

TOKENS = 16  # of the transformer
WORDS = 1000
WIDTH = 256
PICTURE = 64  # pixels a side

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Network:
    """A model with its data: `inputs(n, generator)` draws n samples.

    `step` is about how long one takes alone with 32 samples, in seconds: for the
    estimate of the whole duration.
    """

    name: str
    sentence: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], torch.Tensor]
    classes: int
    step: float

    def model(self, seed: int = 0) -> nn.Module:
        """Return the model with weights that depend on `seed` alone."""
        torch.manual_seed(seed)
        return self.build()

    def batch(self, samples: int, seed: int) -> Batch:
        """Return `samples` samples and their classes; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        inputs = self.inputs(samples, generator)
        return inputs, torch.randint(0, self.classes, (samples,), generator=generator)


class Tokens(nn.Module):
    """Words and their places, [n, tokens] to [n, tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        return self.word(words) + self.place  # type: ignore[no-any-return]


class Mean(nn.Module):
    """The mean over the tokens, [n, tokens, width] to [n, width]."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean."""
        return values.mean(1)


def dense(*widths: int) -> nn.Module:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def transformer() -> nn.Module:
    """Return three encoder layers between an embedding and a classifier."""
    layers = [
        nn.TransformerEncoderLayer(
            WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(3)
    ]
    return nn.Sequential(Tokens(), *layers, nn.LayerNorm(WIDTH), Mean(), nn.Linear(WIDTH, 100))


def vectors(width: int, samples: int, generator: torch.Generator) -> torch.Tensor:
    """Draw vectors."""
    return torch.randn(samples, width, generator=generator)


def sentences(samples: int, generator: torch.Generator) -> torch.Tensor:
    """Draw rows of word numbers."""
    return torch.randint(0, WORDS, (samples, TOKENS), generator=generator)


def pictures(samples: int, generator: torch.Generator) -> torch.Tensor:
    """Draw pictures of three channels."""
    return torch.randn(samples, 3, PICTURE, PICTURE, generator=generator)


def layered(name: str, widths: list[int], sentence: str, step: float) -> Network:
    """Return a network of linear layers."""
    inputs = partial(vectors, widths[0])
    return Network(name, sentence, partial(dense, *widths), inputs, widths[-1], step)


_ALL = (
    layered("tiny", [37, 61, 10], "2 linear layers of awkward widths, 2,948 parameters", 4e-4),
    layered("1m", [512] * 5, "4 linear layers of 512, 1.05 M parameters", 3e-3),
    layered("25m", [2048] * 7, "6 linear layers of 2048, 25.2 M parameters", 0.08),
    layered("100m", [4096] * 7, "6 linear layers of 4096, 100.7 M parameters", 0.35),
    Network(
        "transformer", f"3 encoder layers of {WIDTH}, {TOKENS} tokens, 2.66 M parameters",
        transformer, sentences, 100, 0.07,
    ),
    Network(
        "resnet50", f"ResNet-50, pictures of {PICTURE}x{PICTURE}, 25.6 M parameters",
        resnet50, pictures, 1000, 1.5,
    ),
)  # fmt: skip

NETWORKS = {network.name: network for network in _ALL}

# Rates so small that nothing is learnt by heart: gradients stay ordinary numbers.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-5),
}


def chosen(flag: str, text: str, names: Any) -> list[str]:
    """Return the names listed in `text`; UsageError for one that is not in `names`."""
    found = [name for name in text.split(",") if name]
    for name in found:
        if name not in names:
            raise UsageError(f"{flag} {name}: choose from {','.join(names)}")
    if not found:
        raise UsageError(f"{flag}: choose one or several of {','.join(names)}")
    return list(dict.fromkeys(found))


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a model that have parameters, one after another."""
    cut: Callable[[], Iterable[nn.Module]] = getattr(model, "blocks", model.children)
    for part in cut():
        if next(part.parameters(), None) is not None:
            yield part


def count(network: Network) -> int:
    """Return how many numbers the parameters are, without making them."""
    with torch.device("meta"):
        return sum(each.numel() for each in network.build().parameters())
