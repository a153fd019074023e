"""The cost of the audit: audited steps and other steps in turn, with the same trainer.

    python -m benchmarks.audit [--ranks 2] [--pairs 40]

The model is that of `benchmarks.step` with 25 M parameters. A pair is two steps on the same batch,
one of which is audited, in an order that alternates from pair to pair. The table has the median of
the differences with its interval (at least 95%), and the share of it in the time of a run that
audits every 10th step, or every 100th, the default.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

import lockstep as ls
from benchmarks.checks import interval, replaced, time_in_pairs
from benchmarks.step.networks import NETWORKS

WARM_UP = 3  # steps


class Workload(NamedTuple):
    """Micro-batches of a batch, and its samples per rank."""

    microbatches: int
    samples: int


WORKLOADS = [Workload(8, 32), Workload(8, 128), Workload(32, 128), Workload(2, 32)]


def measure(workload: Workload, pairs: int) -> list[tuple[float, float]]:
    """Return the seconds of an audited step and of another one, pair by pair."""
    network = NETWORKS["25m"]
    trainer = ls.Trainer(
        network.model(),
        nn.CrossEntropyLoss(),
        partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        microbatches=workload.microbatches,
        audit=ls.AuditConfig(every_steps=1),
        loggers=[],
        progress=False,
    )
    batch = network.batch(workload.samples * ls.world_size(), 0)

    def timed(is_audited: bool) -> float:
        with replaced(("lockstep.audit.audit_hook.is_audited", lambda step, every: is_audited)):
            begun = time.perf_counter()
            trainer.step(batch)
            return time.perf_counter() - begun

    for _ in range(WARM_UP):
        timed(is_audited=True)
    found: list[tuple[float, float]] = time_in_pairs(timed, pairs)
    return found


def work(pairs: int) -> list[list[tuple[float, float]]]:
    """Measure all workloads on this rank."""
    ls.init()
    return [measure(workload, pairs) for workload in WORKLOADS]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps (40)")
    options = parser.parse_args()
    results = ls.launch(work, (options.pairs,), nprocs=options.ranks, timeout=3600.0)[0]
    print("| micro-batches | samples per rank | step | an audit costs | N = 100 | N = 10 |")
    print("|---|---|---|---|---|---|")
    for workload, pairs in zip(WORKLOADS, results, strict=True):
        without = statistics.median(off for _, off in pairs)
        median, low, high = interval([on - off for on, off in pairs])
        shares = [
            f"{100 * median / without / every:.2f}% ({100 * low / without / every:.2f} to "
            f"{100 * high / without / every:.2f})"
            for every in (100, 10)
        ]
        print(
            f"| {workload.microbatches} | {workload.samples} | {without * 1e3:.0f} ms | "
            f"{median * 1e3:.1f} ms | {' | '.join(shares)} |"
        )


if __name__ == "__main__":
    main()
