"""Whole trainings with all cores: samples per second of the trainer and of plain PyTorch.

    python -m benchmarks.trainings [--rounds 12] [NAME ...]

Every contender has processes of its own, which take turns, a few steps at a time, and sleep
otherwise: plain PyTorch as it starts, with all cores and the whole batch in one pass;
`trainer.step` after `ls.init()` on one rank with all cores; and on two ranks with half of the cores
each. The trainer divides each batch into 8 micro-batches. A ratio belongs to a round. The losses of
the last steps are compared: those of the two layouts have to be equal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

import lockstep as ls
from benchmarks.step.networks import NETWORKS, Network, pictures
from examples.resnet import resnet18
from lockstep.launcher.rank_stores import choose_port
from lockstep.tools.commands.bench import describe_machine
from lockstep.tools.recipes.digits import digit_network

BATCH = 32
MICROBATCHES = 8
SECONDS = 0.5
Data = tuple[torch.Tensor, torch.Tensor]


class Lstm(nn.Module):
    """Two recurrent layers of 128 over 50 numbers, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(32, 128, 2, batch_first=True)
        self.classify = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of each sequence, from its last state."""
        return self.classify(self.layers(x)[0][:, -1])


def draw(*shape: int, classes: int) -> Data:
    """Return a batch of random samples."""
    return torch.randn(BATCH, *shape), torch.randint(classes, (BATCH,))


RESNET18 = Network("resnet18", "", partial(resnet18, classes=10), pictures, 10, 0.5)

TRANSFORMER = NETWORKS["transformer"]

TRAININGS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Data]]] = {
    "digits": (digit_network, partial(draw, 1, 28, 28, classes=10)),
    "transformer": (TRANSFORMER.model, partial(TRANSFORMER.batch, BATCH, 0)),
    "resnet18": (RESNET18.model, partial(RESNET18.batch, BATCH, 0)),
    "lstm": (Lstm, partial(draw, 50, 32, classes=10)),
}

CONTENDERS = {"plain": 1, "trainer": 1, "trainer, 2 ranks": 2}
"""The number of processes by contender."""


def build(name: str, contender: str) -> Callable[[], float]:
    """Return a function that takes a step and returns its loss."""
    if contender != "plain":
        ls.init()
    torch.manual_seed(0)
    make_model, make_batch = TRAININGS[name]
    model = make_model()
    inputs, targets = make_batch()
    loss_function = nn.CrossEntropyLoss()
    make_optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    if contender == "plain":
        optimizer = make_optimizer(model.parameters())

        def step() -> float:
            loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step
    trainer = ls.Trainer(
        model, loss_function, make_optimizer, microbatches=MICROBATCHES, progress=False
    )
    return lambda: trainer.step((inputs, targets))


def work(name: str, contender: str) -> None:
    """Take as many steps as each line of the input says; print the seconds and the last loss."""
    step = build(name, contender)
    for line in sys.stdin:
        begun = time.perf_counter()
        loss = 0.0
        for _ in range(int(line)):
            loss = step()
        print(time.perf_counter() - begun, loss, flush=True)


class Contender:
    """The processes of a contender."""

    def __init__(self, name: str, contender: str) -> None:
        ranks = CONTENDERS[contender]
        command = [sys.executable, "-m", "benchmarks.trainings", "--work", contender, name]
        port = choose_port("127.0.0.1")
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
                    **{name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
            for rank in range(ranks)
        ]

    def step(self, steps: int) -> tuple[float, float]:
        """Take some steps; return the seconds and the last loss, of rank 0."""
        for process in self._processes:
            assert process.stdin is not None
            print(steps, file=process.stdin, flush=True)
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            seconds, loss = map(float, process.stdout.readline().split())
            answers.append((seconds, loss))
        return answers[0]

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.communicate()


def compare(name: str, rounds: int) -> str:
    """Return the row of a training."""
    contenders = {contender: Contender(name, contender) for contender in CONTENDERS}
    for one in contenders.values():
        one.step(12)  # in the first ones, passes and layouts are tried
    steps = max(3, int(SECONDS / (contenders["plain"].step(5)[0] / 5)))
    for one in list(contenders.values())[1:]:
        one.step(5)
    times: dict[str, list[float]] = {contender: [] for contender in contenders}
    losses = {}
    for _ in range(rounds):
        for contender, one in contenders.items():
            seconds, losses[contender] = one.step(steps)
            times[contender].append(seconds)
    for one in contenders.values():
        one.end()
    assert losses["trainer"] == losses["trainer, 2 ranks"], losses
    rate = BATCH * steps / statistics.median(times["plain"])
    cells = [name, f"{rate:.0f}"]
    for contender in list(contenders)[1:]:
        pairs = zip(times["plain"], times[contender], strict=True)
        ratios = sorted(plain / own for plain, own in pairs)
        cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Whole trainings with all cores.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TRAININGS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--work", choices=CONTENDERS, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if unknown := sorted(set(given.names) - TRAININGS.keys()):
        parser.error(f"no training {', '.join(unknown)}; there are {', '.join(TRAININGS)}")
    if given.work is not None:
        work(given.names[0], given.work)
        return
    print("| training | plain, samples/s | trainer | trainer, 2 ranks |\n|---|---|---|---|")
    for name in given.names or TRAININGS:
        print(compare(name, given.rounds), flush=True)
    print(f"\n{describe_machine()}. Command: `python -m benchmarks.trainings`.")


if __name__ == "__main__":
    main()
