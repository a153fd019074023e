"""The time of a step with compiled blocks beside that of the same model without compilation.

    python benchmarks/compile.py [MODEL ...]     writes benchmarks/compile.json and compile.md

Both trainers are in the same processes and take turns of a few steps each. The first compilation
is timed with an empty cache and again with the cache that it has filled. The page is written anew
from all models in compile.json, so that each can be measured alone.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lockstep as ls
from lockstep.record.run_environment import describe_environment

TURNS = 5
STEPS = 2
MICROBATCHES = 8
HERE = Path(__file__).parent


class Perceptron(nn.Module):
    """Two linear layers with a normalization, an activation and dropout."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inputs)
        self.inner = nn.Linear(inputs, 512)
        self.outer = nn.Linear(512, outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.outer(F.dropout(F.gelu(self.inner(self.norm(inputs))), 0.1))


class Transformer(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first = nn.LayerNorm(width)
        self.second = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        samples, length, width = values.shape
        split = self.qkv(self.first(values)).view(samples, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined = found.transpose(1, 2).reshape(samples, length, width)
        values = values + F.dropout(self.out(joined), 0.1)
        return values + F.dropout(self.outer(F.gelu(self.inner(self.second(values)))), 0.1)


class Convolution(nn.Module):
    """A convolution with batch norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.convolution(inputs)))


class Mean(nn.Module):
    """The mean over the positions of a sequence, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 10)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values.mean(dim=1))


def perceptrons() -> nn.Sequential:
    """Four perceptrons, 2.2 M parameters."""
    return nn.Sequential(*(Perceptron(512, 512) for _ in range(4)), nn.Linear(512, 10))


def transformers() -> nn.Sequential:
    """Two transformer blocks, 1.6 M parameters."""
    return nn.Sequential(Transformer(256, 4), Transformer(256, 4), Mean(256))


def convolutions() -> nn.Sequential:
    """Three convolutions with batch norm, 0.1 M parameters."""
    blocks = [Convolution(3, 32), Convolution(32, 64), Convolution(64, 128)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "perceptrons": (perceptrons, (1024, 512)),
    "transformer blocks": (transformers, (32, 32, 256)),
    "convolutions": (convolutions, (32, 3, 16, 16)),
}
"""Each model, and the shape of its global batch."""


def train(name: str, cache: str, turns: int) -> dict[str, Any]:
    """Train both models on this rank; return times in seconds and the digests."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    ls.init(timeout=900.0)
    build, shape = MODELS[name]
    trainers = {}
    for kind in ("eager", "compiled"):
        torch.manual_seed(0)
        model = build()
        if kind == "compiled":
            for block in model:
                block.compile()
        trainers[kind] = ls.Trainer(
            model,
            nn.CrossEntropyLoss(),
            partial(torch.optim.SGD, lr=0.01),
            microbatches=MICROBATCHES,
            progress=False,
        )
    generator = torch.Generator().manual_seed(1)
    batch = (
        torch.randn(*shape, generator=generator),
        torch.randint(0, 10, shape[:1], generator=generator),
    )
    first = {}
    seconds = {kind: [] for kind in trainers}
    for kind, trainer in trainers.items():
        begun = time.perf_counter()
        trainer.step(batch)
        first[kind] = time.perf_counter() - begun
        trainer.step(batch)
    for turn in range(turns):
        for kind in ("eager", "compiled") if turn % 2 else ("compiled", "eager"):
            begun = time.perf_counter()
            for _ in range(STEPS):
                trainers[kind].step(batch)
            seconds[kind].append((time.perf_counter() - begun) / STEPS)
    return {"first": first, "seconds": seconds, "digest": trainers["compiled"].digest()}


def measure(names: list[str]) -> dict[str, Any]:
    """Return the times of some models on one and two ranks."""
    found = {}
    for name in names:
        row: dict[str, Any] = {"ranks": {}}
        with tempfile.TemporaryDirectory() as cache:
            for label in ("cold", "warm"):
                (alone,) = ls.launch(train, (name, cache, TURNS), nprocs=1, timeout=900.0)
                row[label] = alone["first"]["compiled"]
            pair = ls.launch(train, (name, cache, TURNS), nprocs=2, timeout=900.0)
        for ranks, outcome in ((1, alone), (2, pair[0])):
            seconds = outcome["seconds"]
            pairs = zip(seconds["eager"], seconds["compiled"], strict=True)
            row["ranks"][str(ranks)] = {**seconds, "ratios": [a / b for a, b in pairs]}
        row["digests"] = sorted({each["digest"] for each in (alone, *pair)})
        found[name] = row
        print(name, {n: statistics.median(each["ratios"]) for n, each in row["ranks"].items()})
    return {
        "benchmark": "compile",
        "command": "python benchmarks/compile.py",
        "environment": describe_environment(),
        "models": found,
    }


def describe(result: dict[str, Any], is_provisional: bool) -> str:
    """Return the page."""
    machine = result["environment"]
    rows = []
    for name, row in result["models"].items():
        for ranks, each in row["ranks"].items():
            ratios = sorted(each["ratios"])
            eager, compiled = (statistics.median(each[kind]) for kind in ("eager", "compiled"))
            shape = " x ".join(map(str, MODELS[name][1]))
            rows.append(
                f"| {name}, {shape} | {ranks} | {1e3 * eager:.0f} | {1e3 * compiled:.0f} "
                f"| **{statistics.median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f}) "
                f"| {row['cold']:.0f} | {row['warm']:.1f} |"
            )
    equal = all(len(row["digests"]) == 1 for row in result["models"].values())
    note = "*Provisional*: the machine was busy. " if is_provisional else ""
    return f"""# Compiled blocks

The time of a step with blocks that `block.compile()` compiles with inductor, beside that of the
same model without compilation. {MICROBATCHES} micro-batches, SGD, one thread per rank. Both models
train in the same processes and take turns of {STEPS} steps; the speedup is the median of {TURNS}
pairs of turns, with its range. The sizes are those of the global batch.

| model | ranks | eager, ms | compiled, ms | speedup | first step, empty cache, s | full cache, s |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

The first step compiles the graphs, in this table on one rank. Digests of the compiled models on 1
and 2 ranks are {"equal" if equal else "**different**"}.

{note}Machine: {machine["processor"]}, {machine["cores"]} cores, torch {machine["torch"]}.
Command: `{result["command"]}`
"""


def main() -> None:
    """Measure and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--busy", action="store_true", help="note that the machine was busy")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    result = measure(options.models or list(MODELS))
    path = HERE / "compile.json"
    if options.models and path.exists():
        found = json.loads(path.read_text())["models"] | result["models"]
        result["models"] = {name: found[name] for name in MODELS if name in found}
    path.write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "compile.md").write_text(describe(result, options.busy))
    print(describe(result, options.busy))
    sys.exit(0 if all(len(row["digests"]) == 1 for row in result["models"].values()) else 1)


if __name__ == "__main__":
    main()
