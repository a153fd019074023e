"""The memory that `lockstep plan` predicts, beside the memory that ranks take.

    python -m benchmarks.plan [--ranks 2 4] [--models mlp ...] [--storages shared ...]

Each model is measured on one rank, as by the command, and trained in each layout for a few
steps. The measured value is the peak of the proportional set size of a rank: anonymous pages and
shared memory, where pages that processes share count in part. The table has the mean over ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import lockstep as ls
from benchmarks.step.memory import Watch
from benchmarks.step.networks import NETWORKS
from examples.resnet import resnet18
from lockstep.tools.plan.memory_plan import TrainingMemory, plan_storages

STEPS = 6
MODELS = ("mlp", "perceptron", "transformer", "resnet18")
STORAGES = ("replicated", "shared", "sharded")
ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 1200  # seconds per command


class Workload(NamedTuple):
    """A model and a batch of 8 micro-batches."""

    model: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor


def build(name: str) -> Workload:
    """Return a model with a batch."""
    if name == "mlp":
        network = NETWORKS["25m"]
        return Workload(network.model(), *network.batch(256, seed=0))
    if name == "perceptron":
        sizes = (784, 2048, 4096, 1000)
        layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
        model = nn.Sequential(*layers[:-1])
        return Workload(model, torch.randn(256, 784), torch.randint(1000, (256,)))
    if name == "transformer":
        width = 512
        words = 8000
        tokens = 64
        samples = 8
        layers = [
            nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(6)
        ]
        head = nn.Linear(width, words), nn.Flatten(0, 1)
        model = nn.Sequential(nn.Embedding(words, width), *layers, *head)
        text = torch.randint(words, (samples, tokens + 1))
        return Workload(model, text[:, :-1], text[:, 1:])
    return Workload(resnet18(), torch.randn(32, 3, 224, 224), torch.randint(1000, (32,)))


def mean_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all targets."""
    return nn.functional.cross_entropy(scores, targets.flatten())


def train(name: str, storage: str, folder: str) -> None:
    """Train on this rank, and write the peak of its memory into the folder."""
    ls.init()
    torch.manual_seed(0)
    workload = build(name)
    optimizer = partial(torch.optim.AdamW, lr=1e-4)
    with Watch([os.getpid()]) as watch:
        trainer = ls.Trainer(workload.model, mean_loss, optimizer, storage=storage)
        for _ in range(STEPS):
            trainer.step((workload.inputs, workload.targets))
    Path(folder, f"{ls.rank()}.json").write_text(json.dumps(watch.rank))


def run(*words: str, **variables: str) -> str:
    """Run a lockstep command with environment variables, and return its last line."""
    command = [sys.executable, "-m", "lockstep", *words]
    # This program imports its neighbors.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr}{done.stdout}")
    return (done.stdout.splitlines() or [""])[-1]


def measure(name: str, storage: str, ranks: int) -> float:
    """Return the mean over the ranks of the peak of their memory, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        start = "run", "-n", str(ranks), "--log-dir", folder
        run(*start, __file__, "--train", name, storage, folder)
        return statistics.mean(json.loads(file.read_text()) for file in Path(folder).glob("*.json"))


def main() -> None:
    """Print a row per model, number of ranks and storage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--storages", nargs="+", choices=STORAGES, default=STORAGES)
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(*options.train)
        return
    print("| model | ranks | storage | predicted, MB | measured, MB | difference |")
    print("|---|---|---|---|---|---|")
    for name in options.models:
        words = "plan", "--json", __file__, "--train", name, "replicated", "."
        training = TrainingMemory(**json.loads(run(*words))["measured"])
        for ranks in options.ranks:
            plans = {plan.argument: plan for plan in plan_storages(training, 1, ranks)}
            for storage in options.storages:
                predicted = plans[f'storage="{storage}"'].rank
                measured = measure(name, storage, ranks)
                print(
                    f"| {name} | {ranks} | {storage} | {predicted / 1e6:,.0f} | "
                    f"{measured / 1e6:,.0f} | {predicted / measured - 1:+.1%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
