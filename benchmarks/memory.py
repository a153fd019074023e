"""The memory of a rank that trains a transformer of 100 M parameters, in each storage.

    python -m benchmarks.memory [--ranks 2 4] [--layers 12] [--contenders ddp fsdp2 ...]

All contenders compute 4 micro-batches of one sequence of 16 words per step, with AdamW, on the
backend "lockstep". The value is the peak of the proportional set size of a rank: anonymous pages
and shared memory, where pages that processes share count in part, less what the rank held before
the model was built. The table has the mean over the ranks, and what `lockstep plan` predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from benchmarks.plan import TIMEOUT, run
from benchmarks.step.memory import Watch, proportional
from lockstep.tools.plan.memory_plan import TrainingMemory, plan_storages

WIDTH = 768
WORDS = 10_000
TOKENS = 16
MICROBATCHES = 4
STEPS = 3
CONTENDERS = {
    "ddp": "DistributedDataParallel, with `no_sync` for all but the last micro-batch",
    "fsdp2": "`fully_shard` of each layer, whose gradients are scattered in each micro-batch",
    "fsdp2-default": "the same with the default settings of malloc",
    "exact": "`ls.exact` on the model of fsdp2",
    "replicated": '`ls.Trainer(storage="replicated")`',
    "shared": '`ls.Trainer(storage="shared")`',
    "sharded": '`ls.Trainer(storage="sharded")`',
    "meta": "the same with a model on the meta device",
}
ADAMW = partial(torch.optim.AdamW, lr=1e-4)


def build(layers: int) -> nn.Module:
    """Return the model."""
    torch.manual_seed(0)
    middle = [
        nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, batch_first=True) for _ in range(layers)
    ]
    head = nn.Linear(WIDTH, WORDS), nn.Flatten(0, 1)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *middle, *head)


def mean_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all targets."""
    return nn.functional.cross_entropy(scores, targets.flatten())


def train(contender: str, layers: int, words: torch.Tensor) -> None:
    """Train on this rank."""
    with torch.device("meta" if contender == "meta" else "cpu"):
        model: Any = build(layers)
    storage: Any = "sharded" if contender == "meta" else contender
    if storage in ("replicated", "shared", "sharded"):
        trainer = ls.Trainer(model, mean_loss, ADAMW, microbatches=MICROBATCHES, storage=storage)
        for _ in range(STEPS):
            trainer.step((words[:, :-1], words[:, 1:]))
        return
    exact = None
    if contender == "ddp":
        model = DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ls.world_size(),))
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if contender == "exact":
            exact = ls.exact(model, microbatches=MICROBATCHES)
    optimizer = ADAMW(model.parameters())
    own = words[ls.rank() :: ls.world_size()]
    for _ in range(STEPS):
        for number, sequence in enumerate(own.split(1)):
            is_last = number == len(own) - 1
            if exact is not None:
                exact.begin()
            alone: AbstractContextManager[None] = nullcontext()
            if contender == "ddp" and not is_last:
                alone = model.no_sync()
            with alone:
                loss = mean_loss(model(sequence[:, :-1]), sequence[:, 1:])
                loss = loss / len(own) if exact is None else exact.weigh(loss)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def measure(contender: str, layers: int, ranks: int) -> float:
    """Return the mean over the ranks of the peak of their memory, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        start = "run", "-n", str(ranks), "--log-dir", folder
        # Lockstep changes no settings of malloc if there are others, which may be empty.
        settings = {"GLIBC_TUNABLES": ""} if contender == "fsdp2-default" else {}
        layout = "--layers", str(layers), "--train", contender, folder
        run(*start, __file__, *layout, **settings)
        return statistics.mean(json.loads(file.read_text()) for file in Path(folder).glob("*.json"))


def main() -> None:
    """Print a row per contender and number of ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        contender, folder = options.train
        ls.init(timeout=TIMEOUT)
        words = torch.randint(WORDS, (MICROBATCHES, TOKENS + 1))
        before = proportional(os.getpid())
        with Watch([os.getpid()]) as watch:
            train(contender, options.layers, words)
        Path(folder, f"{ls.rank()}.json").write_text(json.dumps(watch.rank - before))
        return
    layout = "--layers", str(options.layers), "--train", "replicated", "."
    planned = json.loads(run("plan", "--json", __file__, *layout))
    training = TrainingMemory(**{**planned["measured"], "process": 0, "shared": 0})
    print("| contender | ranks | measured, MB | predicted, MB |")
    print("|---|---|---|---|")
    for ranks in options.ranks:
        plans = {plan.argument: plan.rank for plan in plan_storages(training, 1, ranks)}
        for contender in options.contenders:
            measured = measure(contender, options.layers, ranks)
            predicted = plans.get(f'storage="{contender.replace("meta", "sharded")}"')
            text = "" if predicted is None else f"{predicted / 1e6:,.0f}"
            print(f"| {contender} | {ranks} | {measured / 1e6:,.0f} | {text} |", flush=True)


if __name__ == "__main__":
    main()
