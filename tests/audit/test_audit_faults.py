"""Injected faults of the hardware: found, the culprit named, and no bit of the training changed."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.audit.audit_plan import plan_audit
from lockstep.data.assignment import ReplicaShare, on_one_host
from lockstep.kernel.errors import WorkError
from lockstep.launcher.run_folder import RECORD_FILE

RANKS = 3
MICROBATCHES = 4
SHARDED = 4
"""The number of ranks with sharded storage."""
STORAGE = {RANKS: "replicated", SHARDED: "sharded"}
CALLS = {"addmm": 2, "tanh": 1, "mm": 3, "tanh_backward": 1}
"""Operators of the network, with their calls per micro-batch; the last two are in backward."""


def make_trainer(**options):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.BatchNorm1d(16), nn.Linear(16, 4)
    )
    adam = partial(torch.optim.Adam, lr=0.01)
    options = {"microbatches": MICROBATCHES, "progress": False} | options
    return ls.Trainer(network, nn.CrossEntropyLoss(), adam, **options)


def make_batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(24, 6, generator=generator), torch.arange(24) % 4


def read_findings(folder):
    lines = map(json.loads, (Path(folder) / RECORD_FILE).read_text().splitlines())
    return [line for line in lines if line["kind"] == "audit"]


def undisturbed(count):
    """Return the digests of a training without faults, and without the audit."""
    with make_trainer(audit=False) as trainer:
        for batch in make_batches(count):
            trainer.step(batch)
    return trainer.digest(), trainer.optimizer_digest()


class Transients:
    """A transient fault per step, in one of the computations that the audit compares."""

    def __init__(self, seed, steps, ranks):
        share = ReplicaShare(MICROBATCHES, on_one_host(ranks), 0, ranks == SHARDED)
        spans = share.spans(MICROBATCHES)
        draw = random.Random(seed)
        self.ranks = []
        self.microbatches = []
        self.chosen = []
        for step in range(steps):
            plan = plan_audit(step, spans)
            operator = draw.choice([*CALLS])
            is_owner = draw.random() < 0.5
            rank = plan.owner if is_owner else plan.repeater
            before = spans[rank].index(plan.microbatch) if is_owner else len(spans[rank])
            call = CALLS[operator] * before + draw.randrange(CALLS[operator])
            bit = draw.randrange(18, 31)
            self.ranks.append(rank)
            self.microbatches.append(plan.microbatch)
            self.chosen.append((operator, {"call": call, "bit": bit, "seed": draw.random()}))

    def open(self, step):
        from bit_flips import FaultyOperator  # ranks find it by its name

        operator, chosen = self.chosen[step]
        return FaultyOperator(operator, rank=self.ranks[step], **chosen)


def train_with_transients(folder, seed, steps, ranks):
    faults = Transients(seed, steps, ranks)
    flips = []
    config = ls.AuditConfig(every_steps=1, max_corrections=steps)
    with make_trainer(audit=config, loggers=folder, storage=STORAGE[ranks]) as trainer:
        for step, batch in enumerate(make_batches(steps)):
            with faults.open(step) as fault:
                trainer.step(batch)
            flips.append(fault.flips)
    return trainer.digest(), trainer.optimizer_digest(), flips


def check_transients(ranks, folder, steps, n=RANKS, seed=0):
    """Run a training with a fault per step, and return how many changed a result."""
    (expected,) = ranks(partial(undisturbed, steps), 1)
    outcomes = ranks(partial(train_with_transients, folder, seed, steps, n), n, timeout=500)
    assert [outcome[:2] for outcome in outcomes] == [expected] * n
    flips = [sum(of_ranks) for of_ranks in zip(*(outcome[2] for outcome in outcomes), strict=True)]
    assert flips == [1] * steps
    faults = Transients(seed, steps, n)
    findings = read_findings(folder)
    assert len({finding["step"] for finding in findings}) == len(findings)
    for finding in findings:
        step = finding["step"]
        named = finding["rank"], finding["microbatch"], finding["host"], finding["corrected"]
        right = faults.ranks[step], faults.microbatches[step], os.uname().nodename, True
        assert named == right, (step, faults.chosen[step], finding)
        assert finding["core"] in os.sched_getaffinity(0)
    counts = Counter(finding["rank"] for finding in findings)
    last = {finding["rank"]: finding["count"] for finding in findings}
    assert last == counts
    return len(findings)


KEPT = ["update", "moment", "sum", "parameter", "optimizer state", "buffer"]
"""Where a fault lasts on one rank: in what it computes for its copy, or in what it holds."""


@contextlib.contextmanager
def spoil_copy(trainer, kind, rank, seed):
    """Let one rank compute an element of its copy wrong in the body, or flip it afterwards."""
    from bit_flips import FaultyOperator, FaultyReduction, flip_bit

    linear = trainer.module[0]
    norm = trainer.module[3]
    chosen = {"rank": rank, "call": 0, "seed": seed}
    faults = {
        "update": lambda: FaultyOperator("addcdiv_", **chosen),
        "moment": lambda: FaultyOperator("addcmul_", **chosen),
        "sum": lambda: FaultyReduction(linear.weight, **chosen),
    }
    with faults[kind]() if kind in faults else contextlib.nullcontext():
        yield
    if kind not in faults and ls.rank() == rank:
        moments = trainer.optimizer.state[linear.weight]["exp_avg_sq"]
        held = {"parameter": linear.weight, "optimizer state": moments, "buffer": norm.running_var}
        flip_bit(held[kind], random.Random(seed).randrange(held[kind].numel()))


def train_with_spoilt_copies(folder, seed, steps, ranks):
    draw = random.Random(seed)
    spoilt = []
    config = ls.AuditConfig(every_steps=1)
    # Each rank of a sharded model has other parameters.
    kinds = KEPT if ranks == RANKS else ["buffer"]
    with make_trainer(audit=config, loggers=folder, storage=STORAGE[ranks]) as trainer:
        *batches, last = make_batches(steps)
        for step, batch in enumerate(batches):
            kind = kinds[step % len(kinds)]
            rank = draw.randrange(ranks)
            with spoil_copy(trainer, kind, rank, draw.random()):
                trainer.step(batch)
            spoilt.append((step + 1, rank))
        trainer.step(last)  # audits what the fault before it has left
    return trainer.digest(), trainer.optimizer_digest(), spoilt


def check_spoilt_copies(ranks, folder, steps, n=RANKS, seed=0):
    """Run a training with a fault per step that lasts on one rank until the next audit."""
    (expected,) = ranks(partial(undisturbed, steps), 1)
    outcomes = ranks(partial(train_with_spoilt_copies, folder, seed, steps, n), n, timeout=500)
    assert [outcome[:2] for outcome in outcomes] == [expected] * n
    findings = read_findings(folder)
    assert [(finding["step"], finding["rank"]) for finding in findings] == outcomes[0][2]
    assert all(finding["corrected"] for finding in findings)


def test_faults_that_last_on_one_rank(ranks, tmp_path):
    check_spoilt_copies(ranks, tmp_path, len(KEPT) + 1)


def test_a_fault_in_a_buffer_of_a_sharded_model(ranks, tmp_path):
    check_spoilt_copies(ranks, tmp_path, 2, SHARDED)


@pytest.mark.stress
def test_60_faults_that_last_on_one_rank(ranks, tmp_path):
    check_spoilt_copies(ranks, tmp_path, 61, seed=1)


PERMANENT = {
    "forward": ("addmm", {"phase": "forward", "element": 5}),
    "backward": ("mm", {"phase": "backward", "element": 3}),
    "above a value": ("addmm", {"above": 1.0}),
    "often": ("tanh", {"probability": 0.9, "seed": 3}),  # seed 1 changes no result of 4 ranks
}
LATER = ("backward", "often")  # in the long tests only
BEGIN = 4  # a step in which rank 1 computes the audited micro-batch


def train_with_permanent_fault(name, folder, ranks):
    from bit_flips import FaultyOperator

    operator, chosen = PERMANENT[name]
    *batches, last = make_batches(BEGIN + 1)
    config = ls.AuditConfig(every_steps=1)
    with make_trainer(audit=config, loggers=folder, storage=STORAGE[ranks]) as trainer:
        for batch in batches:
            trainer.step(batch)
        with (
            FaultyOperator(operator, rank=1, **chosen),
            pytest.raises(
                WorkError, match=r"step 4, micro-batch \d: rank 1 .*, core \d+\) computed"
            ),
        ):
            trainer.step(last)
    return trainer.digest(), trainer.optimizer_digest()


@pytest.mark.parametrize("n", STORAGE)
@pytest.mark.parametrize(
    "name",
    ["forward", "above a value", *(pytest.param(name, marks=pytest.mark.stress) for name in LATER)],
)
def test_a_permanent_fault_ends_the_run_with_the_weights_before_the_step(ranks, tmp_path, name, n):
    (expected,) = ranks(partial(undisturbed, BEGIN), 1)
    found = ranks(partial(train_with_permanent_fault, name, tmp_path, n), n)
    assert found == [expected] * n
    (finding,) = read_findings(tmp_path)
    assert (finding["step"], finding["rank"], finding["corrected"]) == (BEGIN, 1, False)
    assert finding["operator"] in (None, f"aten.{PERMANENT[name][0]}")


@pytest.mark.parametrize("n", STORAGE)
def test_transient_faults(ranks, tmp_path, n):
    assert check_transients(ranks, tmp_path, 12, n, seed=2) >= 10


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("n", STORAGE)
def test_200_transient_faults(ranks, tmp_path, n):
    """A few faults change no result: a small element of a value that dropout sets to zero."""
    assert check_transients(ranks, tmp_path, 220, n, seed=1) >= 200
