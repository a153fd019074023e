"""Groups of micro-batches in two pipeline stages: steps by the size of the groups.

    python -m benchmarks.stage_passes [--model transformer] [--microbatches 8] [--rounds 20]

Two ranks with one thread each train on batches of 64 random images of 28 x 28. In every round each
size takes some steps in turn: 1 computes micro-batches one by one, and larger ones let each stage
compute groups in one pass. The weights of all trainings of a size have to be equal to those of size
1 after as many steps. Without this program, the first rank chooses the fastest size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import nn

import lockstep as ls
from benchmarks.one_pass import Block
from benchmarks.overhead import describe
from lockstep.pipeline.grouping import SIZES
from lockstep.tools.commands.bench import describe_machine

SAMPLES = 64
WARM = 8  # steps, in which passes are compared
STEPS = 2  # per turn
SCHEDULES = ("1f1b", "gpipe", "zero-bubble")


class Embed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, 7)
        self.position = nn.Parameter(torch.randn(1, 16, width) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.patches(x).flatten(2).transpose(1, 2) + self.position


def transformer() -> nn.Module:
    head = [nn.LayerNorm(64), nn.Flatten(), nn.Linear(16 * 64, 10)]
    return nn.Sequential(Embed(64), *[Block(64, 4) for _ in range(4)], *head)


def linear() -> nn.Module:
    layers = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), *layers, nn.Linear(64, 10))


MODELS = {"transformer": transformer, "linear": linear}


def make_trainer(model: str, schedule: str, microbatches: int) -> ls.Trainer:
    torch.manual_seed(0)
    return ls.Trainer(
        MODELS[model](),
        nn.CrossEntropyLoss(),
        partial(torch.optim.SGD, lr=0.01),
        microbatches=microbatches,
        loggers=(),
        audit=False,
        progress=False,
        pipeline=ls.PipelineConfig(stages=2, schedule=schedule),
    )


def train(model: str, schedule: str, microbatches: int, rounds: int) -> dict[int, list[float]]:
    """Return the milliseconds of a step of each size, by rounds; exit if weights differ."""
    ls.init(threads=1, portable=True)
    sizes = [1, *[size for size in SIZES if 2 * size <= microbatches]]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 1, 28, 28, generator=generator)
    batch = images, torch.randint(10, (SAMPLES,), generator=generator)
    trainers = {size: make_trainer(model, schedule, microbatches) for size in sizes}
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(WARM + rounds):
        for size in sizes[:: 1 if number % 2 else -1]:
            trainer = trainers[size]
            begun = time.perf_counter()
            for _ in range(STEPS):
                trainer.step(batch)
                executor: Any = trainer.engine.setup.executor
                executor.group_sizes.fixed = size
            if number >= WARM:
                times[size].append((time.perf_counter() - begun) / STEPS * 1e3)
    if len({trainer.digest() for trainer in trainers.values()}) > 1:
        raise SystemExit("the weights differ")
    return times


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    print(f"{describe_machine()}\n")
    print("| schedule | size | ms per step | time relative to one by one |")
    print("|---|---|---|---|")
    for schedule in SCHEDULES:
        arguments = given.model, schedule, given.microbatches, given.rounds
        times = ls.launch(train, arguments, nprocs=2)[0]
        for size, own in times.items():
            ratio = describe([one / other for one, other in zip(own, times[1], strict=True)])
            print(f"| {schedule} | {size} | {statistics.median(own):.1f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
