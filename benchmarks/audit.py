"""The cost of the audit: audited steps and other steps in turn, with the same trainer.

    python -m benchmarks.audit [--ranks 2] [--pairs 40] [--first 0]

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
    """Micro-batches of a batch, its samples per rank, and what computes it."""

    microbatches: int
    samples: int
    kind: str = "step"


WORKLOADS = [
    Workload(8, 32),
    Workload(8, 128),
    Workload(32, 128),
    Workload(2, 32),
    Workload(8, 32, "manual step"),
    Workload(8, 32, "2 stages"),
    Workload(8, 32, "sharded"),
    Workload(2, 32, "sharded"),
]


def measure(workload: Workload, pairs: int) -> list[tuple[float, float]]:
    """Return the seconds of an audited step and of another one, pair by pair."""
    network = NETWORKS["25m"]
    stages = 2 if workload.kind == "2 stages" else 1
    compute_loss = nn.CrossEntropyLoss()
    trainer = ls.Trainer(
        network.model(),
        compute_loss,
        partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        microbatches=workload.microbatches,
        audit=ls.AuditConfig(every_steps=1),
        pipeline=ls.PipelineConfig(stages=stages),
        storage="sharded" if workload.kind == "sharded" else "replicated",
        loggers=[],
        progress=False,
    )
    batch = network.batch(workload.samples * ls.world_size(), 0)

    def take_step() -> None:
        if workload.kind != "manual step":
            trainer.step(batch)
            return
        with trainer.manual_step() as step:
            for inputs, targets in step.microbatches(batch):
                step.backward(compute_loss(trainer.model(inputs), targets), final=True)

    def timed(is_audited: bool) -> float:
        choice = "lockstep.audit.audit_config.AuditConfig.is_audited", lambda *_: is_audited
        with replaced(choice):
            begun = time.perf_counter()
            take_step()
            return time.perf_counter() - begun

    for _ in range(WARM_UP):
        timed(is_audited=True)
    found: list[tuple[float, float]] = time_in_pairs(timed, pairs)
    return found


def work(pairs: int, first: int) -> list[list[tuple[float, float]]]:
    """Measure the workloads from number `first` on."""
    ls.init()
    return [measure(workload, pairs) for workload in WORKLOADS[first:]]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps (40)")
    parser.add_argument("--first", type=int, default=0, help="the first workload (0)")
    options = parser.parse_args()
    results = ls.launch(work, (options.pairs, options.first), nprocs=options.ranks, timeout=3600.0)[
        0
    ]
    print("| computed by | M | samples per rank | step | an audit costs | N = 100 | N = 10 |")
    print("|---|---|---|---|---|---|---|")
    for workload, pairs in zip(WORKLOADS[options.first :], results, strict=True):
        without = statistics.median(off for _, off in pairs)
        median, low, high = interval([on - off for on, off in pairs])
        shares = [
            f"{100 * median / without / every:.2f}% ({100 * low / without / every:.2f} to "
            f"{100 * high / without / every:.2f})"
            for every in (100, 10)
        ]
        print(
            f"| {workload.kind} | {workload.microbatches} | {workload.samples} | "
            f"{without * 1e3:.0f} ms | {median * 1e3:.1f} ms | {' | '.join(shares)} |"
        )


if __name__ == "__main__":
    main()
