"""What recorded fingerprints cost: switched on and off in turn, on the same workload.

    python -m benchmarks.fingerprints [--ranks 2] [--pairs 40] [PART ...]

- unit: hashes of every unit, in a step that is recorded with `fingerprints="unit"`;
- digest: the digest of a checkpoint, computed by the thread that writes it, in blocks of 8 steps
  with one checkpoint.

A part is switched off by replacing the functions that do the work. Pairs of blocks, one with
the part and one without, in an order that alternates from pair to pair; the median of their
differences with its interval (at least 95%), by the clock, and in processor time of the thread
that trains, in which other programs hardly count (but waiting for another rank does: --ranks 1).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from benchmarks.checks import SGD, interval, mlp, replaced, time_in_pairs

PARTS = {
    "unit": [
        (
            "lockstep.training.fingerprint_recorder.StepSelection.__contains__",
            lambda self, step: False,
        )
    ],
    "digest": [("lockstep.checkpoint.writer._digest_model", lambda plain, tensors: None)],
}
"""The name of each part, and what replaces it where it is off."""

SMALL, LARGE = "small network, 128 x 784", "25 M parameters, 128 x 784"
MODELS: dict[str, Callable[[], nn.Module]] = {SMALL: lambda: mlp(320), LARGE: lambda: mlp(2300, 5)}
BATCH, CHECKPOINT_STEPS = 128, 8


@dataclass(frozen=True)
class Row:
    """A part on a workload, in blocks of `steps` steps."""

    part: str
    workload: str
    steps: int


ROWS = [
    Row("unit", SMALL, 10),
    Row("unit", LARGE, 2),
    Row("digest", LARGE, CHECKPOINT_STEPS),
]


def make_block(row: Row, folder: Path) -> Callable[[], Any]:
    """Return a function that trains one block of a row."""
    torch.manual_seed(0)
    config = ls.CheckpointConfig(every_steps=CHECKPOINT_STEPS, keep=1)
    trainer = ls.Trainer(
        MODELS[row.workload](),
        nn.CrossEntropyLoss(),
        SGD,
        loggers=folder,
        progress=False,
        fingerprints="unit" if row.part == "unit" else None,
        checkpoint=config if row.part == "digest" else None,
    )
    samples = BATCH * row.steps
    dataset = TensorDataset(torch.randn(samples, 784), torch.arange(samples) % 10)

    def train() -> None:
        for batch in trainer.batches(dataset, BATCH):
            trainer.step(batch)
        if trainer._run._checkpoints is not None:
            trainer._run._checkpoints.writer.wait()

    return train


Times = tuple[float, float]
"""Seconds per step: by the clock, and of processor time."""


def measure(row: Row, pairs: int, folder: Path) -> list[tuple[Times, Times]]:
    """Return the times of a row's steps with and without the part, pair by pair."""
    train = make_block(row, folder)

    def timed(is_on: bool) -> Times:
        with replaced(*([] if is_on else PARTS[row.part])):
            begun, before = time.perf_counter(), time.thread_time()
            train()
            wall, own = time.perf_counter() - begun, time.thread_time() - before
            return wall / row.steps, own / row.steps

    found: list[tuple[Times, Times]] = time_in_pairs(timed, pairs)
    return found


def work(rows: list[Row], pairs: int, folder: str) -> list[list[tuple[Times, Times]]]:
    """Measure some rows on this rank."""
    ls.init()
    return [measure(row, pairs, Path(folder) / str(number)) for number, row in enumerate(rows)]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to measure, or all")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of blocks per row (40)")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    chosen = options.parts or list(PARTS)
    rows = [row for row in ROWS if row.part in chosen]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (rows, options.pairs, folder)
        results = ls.launch(work, arguments, nprocs=options.ranks, timeout=3600.0)[0]
    print("| part | workload | time | without, per step | the part costs | share |")
    print("|---|---|---|---|---|---|")
    for row, pairs in zip(rows, results, strict=True):
        for number, kind in enumerate(("clock", "processor")):
            without = statistics.median(off[number] for _, off in pairs)
            median, low, high = interval([on[number] - off[number] for on, off in pairs])
            print(
                f"| {row.part} | {row.workload} | {kind} | {without * 1e3:.2f} ms "
                f"| {median * 1e6:.0f} us ({low * 1e6:.0f} to {high * 1e6:.0f}) "
                f"| {100 * median / without:.2f}% |"
            )


if __name__ == "__main__":
    main()
