"""The trainings of `dev/gpu_check.py`: small networks, one after another, on one device.

    lockstep run -n 2 dev/gpu_training.py --device cuda:0 --backend gloo --cases digits,words

Rank 0 prints the digests of the weights and of the optimizer of each case. The layout is the
caller's: they must not depend on it. `--before MODULE:FUNCTION` calls a function first.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep as ls
from examples.resnet import resnet18
from lockstep.data.datasets import digits
from lockstep.tools.recipes.digits import digit_network

__all__ = ["CASES", "Case", "call_before", "words_network"]

TIMEOUT = 120.0  # seconds for each wait


def call_before(function: str | None) -> None:
    """Call the function of `--before`, "MODULE:FUNCTION"."""
    if function is not None:
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)()


class Positions(nn.Module):
    """Adds a learned vector per position."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map [n, length, width] to the same shape."""
        return inputs + self.weight


class MeanOverWords(nn.Module):
    """Averages over the positions."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map [n, length, width] to [n, width]."""
        return inputs.mean(1)


def words_network(width: int = 32, layers: int = 2, length: int = 16) -> nn.Sequential:
    """Return a transformer with dropout from words [n, length] to scores [n, 10]."""
    layer = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, dropout=0.1, batch_first=True)
    return nn.Sequential(
        nn.Embedding(100, width), Positions(length, width), *[layer() for _ in range(layers)],
        MeanOverWords(), nn.Linear(width, 10),
    )  # fmt: skip


def compiled_network() -> nn.Sequential:
    """Return a network with two compiled blocks."""
    first = nn.Sequential(nn.Linear(784, 64), nn.GELU(), nn.Dropout(0.1))
    second = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    blocks: list[Any] = [torch.compile(first), torch.compile(second)]
    return nn.Sequential(nn.Flatten(), *blocks, nn.Linear(64, 10))


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        build: Returns the network.
        batch: Returns a batch of n samples, drawn from a generator of the CPU.
        optimizer: The optimizer.
        dtype: The dtype of autocast; None for float32.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    dtype: torch.dtype | None = None


def draw_digits(n: int, generator: torch.Generator) -> torch.Tensor:
    """Return images of handwritten digits."""
    data = digits()
    chosen = torch.randint(len(data), (n,), generator=generator).tolist()
    return torch.stack([data[index][0] for index in chosen])


def draw_pictures(n: int, generator: torch.Generator) -> torch.Tensor:
    """Return colored noise, which a ResNet reads."""
    return torch.randn(n, 3, 32, 32, generator=generator)


def draw_words(n: int, generator: torch.Generator) -> torch.Tensor:
    """Return sequences of words."""
    return torch.randint(100, (n, 16), generator=generator)


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
ADAMW = partial(torch.optim.AdamW, lr=0.001)
RESNET = partial(resnet18, classes=10)
CASES = {
    "digits": Case(digit_network, draw_digits, SGD),
    "digits in bfloat16": Case(digit_network, draw_digits, SGD, dtype=torch.bfloat16),
    "digits in float16": Case(digit_network, draw_digits, SGD, dtype=torch.float16),
    "resnet18": Case(RESNET, draw_pictures, SGD),
    "resnet18 in bfloat16": Case(RESNET, draw_pictures, SGD, dtype=torch.bfloat16),
    "words": Case(words_network, draw_words, ADAMW),
    "words in bfloat16": Case(words_network, draw_words, ADAMW, torch.bfloat16),
    "compiled": Case(compiled_network, draw_digits, ADAMW),
}


def train(name: str, options: argparse.Namespace) -> str:
    """Train a case in the world of this process; return its digests."""
    case = CASES[name]
    torch.manual_seed(1)
    network = case.build()
    if options.activation:
        network = nn.Sequential(*network.children(), getattr(nn, options.activation)())
    checkpoint = ls.CheckpointConfig(every_steps=2) if options.checkpoint else None
    trainer = ls.Trainer(
        network, nn.CrossEntropyLoss(), case.optimizer, seed=2, autocast_dtype=case.dtype,
        max_grad_norm=1.0, progress=False, checkpoint=checkpoint,
        pipeline=None if options.stages == 1 else ls.PipelineConfig(stages=options.stages),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(
        case.batch(options.steps * 32, generator),
        torch.randint(10, (options.steps * 32,), generator=generator),
    )
    for step, batch in enumerate(trainer.batches(data, batch_size=32, pin_memory=True)):
        trainer.step(batch)
        if options.kill and step == 2 and ls.rank() == 1 and not Path(options.kill).exists():
            Path(options.kill).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return f"{trainer.digest()[:12]} {trainer.optimizer_digest()[:12]}"


def main() -> None:
    """Train the cases of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default="digits", help="comma-separated names")
    parser.add_argument("--device", help="the device of every rank (its own one)")
    parser.add_argument("--backend", help="the backend (that of the device)")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages (1)")
    parser.add_argument("--steps", type=int, default=4, help="steps of 32 samples (4)")
    parser.add_argument("--checkpoint", action="store_true", help="save every second step")
    parser.add_argument("--activation", help="a module of torch.nn after the last one")
    parser.add_argument("--kill", help="rank 1 creates this file and kills itself after step 2")
    parser.add_argument("--before", help="MODULE:FUNCTION to call first")
    options = parser.parse_args()
    call_before(options.before)
    ls.init(device=options.device, backend=options.backend, timeout=TIMEOUT)
    for name in options.cases.split(","):
        digests = train(name, options)
        if ls.rank() == 0:
            print(f"digest {name}: {digests}", flush=True)
    ls.shutdown()


if __name__ == "__main__":
    main()
