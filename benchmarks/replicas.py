"""Two replicas against one process on a compute-bound network.

    python benchmarks/replicas.py            writes benchmarks/replicas.json and replicas.md

Both train the same global batches with the same number of micro-batches, one
after the other, several times in turn; the ratio is taken pair by pair.
"""

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep as ls
from lockstep.record.run_environment import describe_environment

MIN_ROUNDS = 5
WARM_UP = 3
STEPS = 12
BATCH = 64
MICROBATCHES = 8
HERE = Path(__file__).parent


def network() -> nn.Sequential:
    """A convolutional network: 0.4 M parameters, 40 MFLOP a sample forward."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in [(3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2)]:
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def train() -> tuple[list[float], str, str]:
    """Train on this rank; return the seconds of each step, the digest and the backend."""
    world = ls.init()
    trainer = ls.Trainer(
        network(),
        nn.CrossEntropyLoss(),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        microbatches=MICROBATCHES,
    )
    generator = torch.Generator().manual_seed(1)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        inputs = torch.randn(BATCH, 3, 64, 64, generator=generator)
        targets = torch.randint(0, 10, (BATCH,), generator=generator)
        begun = time.perf_counter()
        trainer.step((inputs, targets))
        seconds.append(time.perf_counter() - begun)
    return seconds[WARM_UP:], trainer.digest(), world.backend


def measure() -> dict[str, Any]:
    """Return the speeds of each round, their ratios, and the digests."""
    speeds: dict[int, list[float]] = {1: [], 2: []}
    digests = set()
    backends = set()
    for turn in range(MIN_ROUNDS):
        for ranks in (1, 2) if turn % 2 == 0 else (2, 1):
            outcomes = ls.launch(train, nprocs=ranks, timeout=300.0)
            digests |= {digest for _, digest, _ in outcomes}
            backends |= {backend for _, _, backend in outcomes}
            speeds[ranks].append(BATCH / statistics.median(outcomes[0][0]))
            print(
                f"round {turn + 1}/{MIN_ROUNDS}: {ranks} rank(s) {speeds[ranks][-1]:.1f} samples/s"
            )
    ratios = [two / one for one, two in zip(speeds[1], speeds[2], strict=True)]
    return {
        "benchmark": "replicas",
        "command": "python benchmarks/replicas.py",
        "environment": describe_environment(),
        "global_batch": BATCH,
        "microbatches": MICROBATCHES,
        "backend": " and ".join(sorted(backends)),
        "samples_per_second": {str(ranks): values for ranks, values in speeds.items()},
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "digests": sorted(digests),
    }


def told(result: dict[str, Any]) -> str:
    """Return the page."""
    machine = result["environment"]
    speeds = result["samples_per_second"]
    one, two = (statistics.median(speeds[ranks]) for ranks in ("1", "2"))
    ratios = sorted(result["ratios"])
    return f"""# Two replicas against one process

A compute-bound convolutional network (0.4 M parameters, images of 64x64), global batch {BATCH},
{MICROBATCHES} micro-batches, one thread per rank, backend {result["backend"]}.

| ranks | samples/s (median of {MIN_ROUNDS} rounds) |
|---|---|
| 1 | {one:.1f} |
| 2 | {two:.1f} |

Speedup in each pair: median **{result["ratio"]:.2f}**, from {ratios[0]:.2f} to {ratios[-1]:.2f}.
Different digests: {len(result["digests"])} (1: all runs agree).

Machine: {machine["processor"]}, {machine["cores"]} cores, torch {machine["torch"]}.
Command: `{result["command"]}`
"""


def main() -> None:
    """Measure and write both files."""
    result = measure()
    (HERE / "replicas.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "replicas.md").write_text(told(result))
    print(told(result))
    sys.exit(0 if len(result["digests"]) == 1 else 1)


if __name__ == "__main__":
    main()
