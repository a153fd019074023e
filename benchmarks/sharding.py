"""Step times of a sharded transformer: `ls.exact` on `fully_shard` against FSDP2 alone.

    python -m benchmarks.sharding [-n RANKS] [--backend BACKEND] [--pairs PAIRS]

Both train the same model on the same micro-batches, with AdamW and clipping, in turns within one
process group: a pair of steps is one step of each, and the first of a pair alternates. FSDP2
averages gradients, accumulates them over micro-batches, and clips by torch's norm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import lockstep as ls

MICROBATCHES = 4
SAMPLES = 4
LENGTH = 64
WORDS = 1000


def make_model(width: int, layers: int) -> nn.Module:
    """Return a transformer that is sharded by layers, with the same weights on every rank."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(layers)
    ]
    model = nn.Sequential(nn.Embedding(WORDS, width), *blocks, nn.Linear(width, WORDS))
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


def compute_loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting each word from itself."""
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def make_exact_step(model: nn.Module) -> Callable[[torch.Tensor], None]:
    """Return a function that takes one step by `ls.exact`."""
    exact = ls.exact(model, microbatches=MICROBATCHES, audit=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(words: torch.Tensor) -> None:
        for _ in range(MICROBATCHES // dist.get_world_size()):
            exact.begin()
            exact.weigh(compute_loss(model, words)).backward()
        exact.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_plain_step(model: nn.Module) -> Callable[[torch.Tensor], None]:
    """Return a function that takes one step by FSDP2."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    turns = MICROBATCHES // dist.get_world_size()

    def step(words: torch.Tensor) -> None:
        for _ in range(turns):
            (compute_loss(model, words) / turns).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(width: int, layers: int, pairs: int, backend: str) -> dict[str, float]:
    """Return the median times of both, and the median ratio of a pair."""
    ls.init(backend=backend)
    steps = {
        "lockstep": make_exact_step(make_model(width, layers)),
        "fsdp2": make_plain_step(make_model(width, layers)),
    }
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for pair in range(-2, pairs):  # two pairs to warm up
        for name in sorted(steps, reverse=pair % 2 == 0):
            dist.barrier()
            begun = time.perf_counter()
            steps[name](words)
            dist.barrier()
            if pair >= 0:
                times[name].append(time.perf_counter() - begun)
    ratios = [own / other for own, other in zip(times["lockstep"], times["fsdp2"], strict=True)]
    ls.shutdown()
    return {name: statistics.median(found) for name, found in times.items()} | {
        "ratio": statistics.median(ratios)
    }


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, help="number of ranks (default 2)")
    parser.add_argument(
        "--backend", choices=("gloo", "lockstep"), default="gloo", help="backend (default gloo)"
    )
    parser.add_argument("--pairs", type=int, default=20, help="pairs of steps (default 20)")
    parser.add_argument("--width", type=int, default=512, help="width of the model (default 512)")
    parser.add_argument("--layers", type=int, default=6, help="number of layers (default 6)")
    options = parser.parse_args()
    arguments = options.width, options.layers, options.pairs, options.backend
    found = ls.launch(measure, arguments, nprocs=options.n)[0]
    print(json.dumps({"ranks": options.n, "backend": options.backend, **found}))


if __name__ == "__main__":
    main()
