"""The loop of a vision transformer in micro-batches, beside DistributedDataParallel's.

    python -m benchmarks.one_pass [--ranks 2] [--microbatches 8] [--rounds 12]

The model is a transformer of width 64 and depth 2 on the handwritten digits, 28 batches of 64
samples over all ranks per round, one thread per rank. Every contender has processes of its own,
which take turns, an epoch at a time, and sleep otherwise: a user's script with torch's
DistributedDataParallel on gloo, without Lockstep; the same one that accumulates as many
micro-batches; and the README's loop of `ls.exact`, with one micro-batch at a time and with several
in one pass; and `trainer.step`. No order is shuffled, so all of them train on the same batches. The
weights after each epoch are compared: those of Lockstep's contenders have to be equal, and close to
those of DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

import lockstep as ls
from benchmarks.overhead import describe
from benchmarks.rank_processes import Rendezvous, TorchRunner, answer_requests
from lockstep.data.datasets import digits
from lockstep.tools.commands.bench import describe_machine

BATCH = 64
BATCHES = 28
TIMEOUT = 300.0
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
WARM = 1  # rounds, in the first steps of which passes are compared


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first = nn.LayerNorm(width)
        self.second = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        parts = self.mix(self.first(x)).view(samples, tokens, 3, self.heads, width // self.heads)
        attended = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4))
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(F.gelu(self.widen(self.second(x))))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 7, 7)
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.embed(x).flatten(2).transpose(1, 2)
        rows = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.position
        return self.head(self.norm(self.blocks(rows)[:, 0]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer()


class Distributed:
    """The script of a user with DistributedDataParallel."""

    def __init__(self, parts: int) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
        torch.set_num_threads(1)
        self.parts = parts
        self.model = DistributedDataParallel(network())
        self.optimizer = ADAMW(self.model.parameters())
        dataset = Subset(digits(), range(BATCH * BATCHES))
        sampler: Any = DistributedSampler(dataset, shuffle=False)
        ranks = dist.get_world_size()
        self.loader = DataLoader(dataset, BATCH // ranks // parts, sampler=sampler)

    def train(self) -> None:
        for number, (inputs, targets) in enumerate(self.loader):
            is_last = number % self.parts == self.parts - 1
            with nullcontext() if is_last else self.model.no_sync():
                loss = F.cross_entropy(self.model(inputs), targets) / self.parts
                loss.backward()
            if is_last:
                self.optimizer.step()
                self.optimizer.zero_grad()


class Exact:
    """The same script with the README's lines."""

    def __init__(self, microbatches: int, *, together: bool) -> None:
        ls.init(threads=1, portable=True)
        self.together = together
        self.model = network()
        self.optimizer = ADAMW(self.model.parameters())
        self.exact = ls.exact(
            self.model, self.optimizer, microbatches=microbatches, loggers=(), progress=False
        )
        self.dataset = Subset(digits(), range(BATCH * BATCHES))

    def train(self) -> None:
        reduction = "none" if self.together else "mean"
        batches = self.exact.batches(
            self.dataset, batch_size=BATCH, shuffle=False, together=self.together
        )
        for batch in batches:
            for inputs, targets in batch:
                loss = F.cross_entropy(self.model(inputs), targets, reduction=reduction)
                batch.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()


class Stepped:
    """The loop of a trainer."""

    def __init__(self, microbatches: int) -> None:
        ls.init(threads=1, portable=True)
        self.trainer = ls.Trainer(
            network(),
            nn.CrossEntropyLoss(),
            ADAMW,
            microbatches=microbatches,
            loggers=(),
            progress=False,
        )
        self.model = self.trainer.model
        self.dataset = Subset(digits(), range(BATCH * BATCHES))

    def train(self) -> None:
        for batch in self.trainer.batches(self.dataset, batch_size=BATCH, shuffle=False):
            self.trainer.step(batch)


CONTENDERS = {
    "DistributedDataParallel": lambda ranks, microbatches: Distributed(1),
    "DistributedDataParallel, accumulated": lambda ranks, microbatches: Distributed(
        microbatches // ranks
    ),
    "ls.exact": lambda ranks, microbatches: Exact(microbatches, together=False),
    "ls.exact, together": lambda ranks, microbatches: Exact(microbatches, together=True),
    "trainer.step": lambda ranks, microbatches: Stepped(microbatches),
}


def run_rank(microbatches: int, name: str, folder: str, key: str, timeout: float) -> None:
    """Train epochs on this rank as it is asked to."""
    import os

    contender: Any = CONTENDERS[name](int(os.environ["WORLD_SIZE"]), microbatches)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        dist.barrier()
        began = time.perf_counter()
        contender.train()
        seconds = time.perf_counter() - began
        weights = [parameter.detach().double().sum() for parameter in contender.model.parameters()]
        return {"seconds": seconds, "weights": torch.stack(weights).tolist()}

    answer_requests(answer, folder, {"hello": dist.get_rank(), "library": torch.__version__})
    dist.destroy_process_group() if name.startswith("Dist") else ls.shutdown()


def check(weights: dict[str, list[float]]) -> None:
    """Exit if the weights of a contender are wrong."""
    expected = torch.tensor(weights["DistributedDataParallel"])
    own = [found for name, found in weights.items() if not name.startswith("Dist")]
    if any(found != own[0] for found in own):
        raise SystemExit(f"the bits of Lockstep's contenders differ: {weights}")
    for name, found in weights.items():
        if not torch.allclose(torch.tensor(found), expected, rtol=1e-2, atol=0.1):
            raise SystemExit(f"the weights of {name} differ: {found}, not {expected.tolist()}")


def measure(ranks: int, microbatches: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender's epochs, those of the slowest rank, by turns."""
    rendezvous = Rendezvous(ranks, TIMEOUT)
    main = partial(run_rank, microbatches)
    runners: dict[str, TorchRunner] = {}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    try:
        for name in CONTENDERS:
            runners[name] = TorchRunner(name, rendezvous, main)
        for number in range(WARM + rounds):
            weights = {}
            for name in list(runners)[:: 1 if number % 2 else -1]:
                answers = runners[name].ask({})
                if reasons := [answer["error"] for answer in answers if "error" in answer]:
                    raise SystemExit(f"{name}: {reasons[0]}")
                weights[name] = answers[0]["weights"]
                if number >= WARM:
                    times[name].append(max(answer["seconds"] for answer in answers))
            if number == 0:  # later, differences by rounding grow
                check(weights)
    finally:
        for runner in runners.values():
            runner.end()
        rendezvous.close()
    return times


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds must be at least 2: the quartiles of one are not known")
    times = measure(given.ranks, given.microbatches, given.rounds)
    first = next(iter(times.values()))
    print(f"{describe_machine()}\n")
    print("| contender | samples/s | time relative to the first |")
    print("|---|---|---|")
    for name, seconds in times.items():
        speed = BATCH * BATCHES / statistics.median(seconds)
        ratio = describe([one / other for one, other in zip(seconds, first, strict=True)])
        print(f"| {name} | {speed:,.0f} | {ratio} |")


if __name__ == "__main__":
    main()
