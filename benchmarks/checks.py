"""What the run-time checks cost: each switched on and off in turn, on the same workload.

    python benchmarks/checks.py [--ranks 2] [--pairs 40] [CHECK ...]

A check is switched off by replacing the function that does the work; there is no option
for it. A row compares pairs of blocks, one with the check and one without, in an
order that alternates from pair to pair. The interval of the median difference is that of
its order statistics (at least 95%).
"""

import argparse
import contextlib
import functools
import math
import statistics
import time
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls

SGD = functools.partial(torch.optim.SGD, lr=0.001)


# --- checks: the name of each, and what replaces it where it is off ------------------------------


@contextlib.contextmanager
def replaced(*replacements):
    """Replace attributes, given as "module.attribute" and a value, while the body runs."""
    with contextlib.ExitStack() as stack:
        for target, value in replacements:
            stack.enter_context(mock.patch(target, value))
        yield


CHECKS = {
    "whole batch": [("lockstep.model.parallel_context.hash_content", lambda batch: "0")],
    "samples": [
        ("lockstep.data.map_dataset.MapSource._check", lambda self, span, pieces: ()),
        ("lockstep.data.map_dataset.TensorSource._describe", lambda self, span: ()),
        ("lockstep.data.loader.Batches._exchange_samples", lambda self, probed: [b"[]"]),
    ],
    "settings": [
        ("lockstep.training.hyperparameter_check.HyperparameterCheck.begin", lambda *_: None),
        ("lockstep.training.hyperparameter_check.HyperparameterCheck.status", lambda *_: ""),
    ],
    "parameters": [
        ("lockstep.model.held_parameters.HeldParameters.begin", lambda self: ""),
        ("lockstep.model.held_parameters.HeldParameters.finish", lambda self: ""),
    ],
}


# --- workloads: each makes a function that runs one block, and says what a block holds -----------


class Decoded(Dataset):
    """Pictures that take about a millisecond each to load."""

    def __len__(self):
        return 320

    def __getitem__(self, index):
        picture = torch.rand(3, 224, 224)
        return (picture - 0.45) / 0.225, index % 10


def mlp(width, depth=1):
    layers = [nn.Linear(784, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, 10))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip


def steps(model, shape, count):
    """Return a block of `count` steps on a whole batch of `shape`."""
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD)
    batch = torch.randn(shape), torch.randint(0, 10, shape[:1])

    def run():
        for _ in range(count):
            trainer.step(batch)

    return run, count


def epoch(model, dataset, batch_size):
    """Return a block of one epoch."""
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), SGD)

    def run():
        for batch in trainer.batches(dataset, batch_size):
            trainer.step(batch)

    return run, 1


@dataclass(frozen=True)
class Row:
    """A check on a workload; `unit` is what the workload counts."""

    check: str
    workload: str
    unit: str
    make: object


ROWS = [
    Row("whole batch", "small network, 128 x 784", "step", lambda: steps(mlp(320), (128, 784), 4)),
    Row("whole batch", "25 M parameters, 128 x 784", "step",
        lambda: steps(mlp(2300, 5), (128, 784), 1)),
    Row("whole batch", "convolution, 32 x 3 x 224 x 224", "step",
        lambda: steps(convolutional(), (32, 3, 224, 224), 2)),
    Row("settings", "small network, 128 x 784", "step", lambda: steps(mlp(320), (128, 784), 4)),
    Row("settings", "25 M parameters, 128 x 784", "step",
        lambda: steps(mlp(2300, 5), (128, 784), 1)),
    Row("parameters", "small network, 128 x 784", "step",
        lambda: steps(mlp(320), (128, 784), 4)),
    Row("parameters", "25 M parameters, 128 x 784", "step",
        lambda: steps(mlp(2300, 5), (128, 784), 1)),
    Row("samples", "45 steps, 5,760 x 784 in memory", "epoch",
        lambda: epoch(mlp(320), TensorDataset(torch.randn(5760, 784), torch.arange(5760) % 10),
                      128)),
    Row("samples", "10 steps, 320 pictures loaded one by one", "epoch",
        lambda: epoch(convolutional(), Decoded(), 32)),
]  # fmt: skip


# --- measuring ------------------------------------------------------------------------------------


def time_in_pairs(timed, pairs):
    """Return what `timed(True)` and `timed(False)` return, pair by pair, in alternating order."""
    for on in (True, False, True, False):
        timed(on)
    found = []
    for pair in range(pairs):
        first = pair % 2 == 0
        one = timed(first)
        other = timed(not first)
        found.append((one, other) if first else (other, one))
    return found


def measured(number, pairs):
    """Return the seconds of a row's units with and without the check, pair by pair."""
    torch.manual_seed(0)
    row = ROWS[number]
    run, count = row.make()

    def timed(on):
        with replaced(*([] if on else CHECKS[row.check])):
            begun = time.perf_counter()
            run()
            return (time.perf_counter() - begun) / count

    return time_in_pairs(timed, pairs)


def work(numbers, pairs):
    ls.init()
    return [measured(number, pairs) for number in numbers]


def interval(values):
    """Return the median of `values` and the bounds of its interval."""
    ordered = sorted(values)
    n = len(ordered)
    below = 0.0
    lowest = 0
    while below + math.comb(n, lowest) / 2**n <= 0.025:
        below += math.comb(n, lowest) / 2**n
        lowest += 1
    lowest = max(lowest - 1, 0)
    return statistics.median(ordered), ordered[lowest], ordered[n - 1 - lowest]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="checks to measure, or all")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of blocks per row (40)")
    options = parser.parse_args()
    if unknown := set(options.checks) - CHECKS.keys():
        parser.error(f"no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    chosen = options.checks or list(CHECKS)
    numbers = [number for number, row in enumerate(ROWS) if row.check in chosen]
    results = ls.launch(work, (numbers, options.pairs), nprocs=options.ranks, timeout=3600.0)[0]
    print("| check | workload | without | the check costs | share |\n|---|---|---|---|---|")
    for number, pairs in zip(numbers, results, strict=True):
        row = ROWS[number]
        without = statistics.median(off for _, off in pairs)
        median, low, high = interval([on - off for on, off in pairs])
        print(
            f"| {row.check} | {row.workload} | {without * 1e3:.2f} ms per {row.unit} "
            f"| {median * 1e6:.0f} us ({low * 1e6:.0f} to {high * 1e6:.0f}) "
            f"| {100 * median / without:.2f}% |"
        )


if __name__ == "__main__":
    main()
