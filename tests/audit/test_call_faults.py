"""Injected faults in manual steps, stages and `ls.exact`: found, and the culprit named.

A step that can be computed again has the bits of an undisturbed one. So has any other one if the
wrong result is a repetition; otherwise the finding says that the gradients contain it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from lockstep.audit import call_audit
from lockstep.audit.recorded_call import RecordedCall
from lockstep.kernel.errors import LockstepError
from records import FindingLogger

BLOCKS = 4
MICROBATCHES = 4
EVERY = {"every_steps": 1}


class Block(nn.Module):
    """Has an operator each for forward and backward."""

    lockstep_buffer_rules = {"mean": "mean"}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(inputs).tanh()
        self.mean.copy_(outputs.detach().mean(0))
        return outputs


class Layout(NamedTuple):
    """How a training computes its steps, and how many blocks a call of the audit has."""

    ranks: int
    blocks: int
    is_repeatable: bool
    pipeline: dict[str, Any] = {}


def staged(ranks: int, schedule: str, blocks: int = BLOCKS // 2) -> Layout:
    options = {"stages": 2, "schedule": schedule, "balance": [blocks] * (BLOCKS // blocks)}
    if schedule == "interleaved":
        options["stages_per_rank"] = BLOCKS // 2 // blocks
    return Layout(ranks, blocks, is_repeatable=True, pipeline=options)


LAYOUTS = {
    "manual": Layout(2, BLOCKS, is_repeatable=False),
    "attempts": Layout(2, BLOCKS, is_repeatable=True),
    "exact": Layout(2, BLOCKS, is_repeatable=False),
    "1f1b": staged(2, "1f1b"),
    "gpipe": staged(2, "gpipe"),
    "interleaved": staged(2, "interleaved", blocks=1),
    "replicas": staged(4, "1f1b"),
}


def make_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randn(2, 12, 6, generator=draw) for _ in range(count)]
    return [(inputs, targets) for inputs, targets in rows]


class Training:
    """A training in one of the layouts."""

    def __init__(self, name: str, **config: Any) -> None:
        torch.manual_seed(0)
        self.name = name
        self.findings = FindingLogger()
        self.model: Any = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        audit = ls.AuditConfig(**config) if config else False
        adam = partial(torch.optim.Adam, lr=0.01)
        loggers = [self.findings] if ls.rank() == 0 else []
        if name == "exact":
            wrapped = DistributedDataParallel(self.model) if ls.world_size() > 1 else self.model
            self.wrapped = wrapped
            self.optimizer = adam(self.model.parameters())
            self.exact = ls.exact(wrapped, MICROBATCHES, audit=audit, loggers=loggers)
            return
        layout = LAYOUTS.get(name)
        pipeline = ls.PipelineConfig(**layout.pipeline) if layout and ls.world_size() > 1 else None
        options = {"microbatches": MICROBATCHES, "audit": audit, "pipeline": pipeline}
        self.trainer = ls.Trainer(self.model, nn.MSELoss(), adam, loggers=loggers, **options)

    def take(self, batch: Any) -> None:
        if self.name == "exact":
            self._take_exact(batch)
        elif self.name == "attempts":
            for attempt in self.trainer.attempts(batch):
                with attempt as step:
                    self._compute(step, step.microbatches())
        elif self.name == "manual":
            with self.trainer.manual_step() as step:
                self._compute(step, step.microbatches(batch))
        else:
            self.trainer.step(batch)

    def _compute(self, step: Any, microbatches: Any) -> None:
        for inputs, targets in microbatches:
            step.backward(nn.functional.mse_loss(self.trainer.model(inputs), targets))

    def _take_exact(self, batch: Any) -> None:
        size = MICROBATCHES // ls.world_size()
        parts = [part.tensor_split(MICROBATCHES) for part in batch]
        self.optimizer.zero_grad()
        for index in range(ls.rank() * size, (ls.rank() + 1) * size):
            self.exact.begin()
            loss = nn.functional.mse_loss(self.wrapped(parts[0][index]), parts[1][index])
            self.exact.weigh(loss).backward()
        self.optimizer.step()

    def digest(self) -> Any:
        if self.name == "exact":
            return ls.digest(self.model)
        return self.trainer.digest(), self.trainer.optimizer_digest()


def undisturbed(name: str, count: int) -> Any:
    training = Training("exact" if name == "exact" else "manual")
    for batch in make_batches(count):
        training.take(batch)
    return training.digest()


# --- transient faults ----------------------------------------------------------------------------


class Transient(NamedTuple):
    """A fault in one step: where, and in which of the two computations that are compared."""

    rank: int
    is_own: bool
    phase: str
    operator: str
    call: int
    bit: int
    seed: float


def plan_transients(name: str, seed: int, steps: int) -> list[Transient]:
    layout = LAYOUTS[name]
    draw = random.Random(seed)
    faults = []
    for _ in range(steps):
        is_own = layout.is_repeatable and draw.random() < 0.5
        phase = draw.choice(["forward", "backward"])
        operators = {"forward": ["addmm", "tanh"], "backward": ["mm", "tanh_backward"]}[phase]
        where = draw.randrange(layout.ranks), is_own, phase, draw.choice(operators)
        faults.append(
            Transient(*where, draw.randrange(layout.blocks), draw.randrange(18, 31), draw.random())
        )
    return faults


@contextlib.contextmanager
def inject(fault: Transient) -> Any:
    """Let an operator compute wrong once, in a call that the audit records or in its repetition."""
    from bit_flips import FaultyOperator  # ranks find it by its name

    class Armed(FaultyOperator):
        is_armed = False

        def _spoil(self, result: torch.Tensor) -> None:
            if self.is_armed:
                super()._spoil(result)

    chosen = {"rank": fault.rank, "call": fault.call, "bit": fault.bit, "seed": fault.seed}
    armed = Armed(fault.operator, **chosen)
    moments = {"forward": "__init__", "backward": "_begin_backward"}
    moment = moments[fault.phase] if fault.is_own else "repeat"
    original = getattr(RecordedCall, moment)

    def begin(call: RecordedCall, *args: Any, **options: Any) -> Any:
        armed.is_armed = True
        return original(call, *args, **options)

    setattr(RecordedCall, moment, begin)
    try:
        with armed:
            yield armed
    finally:
        setattr(RecordedCall, moment, original)


def train_with_transients(name: str, seed: int, steps: int) -> tuple[Any, list[Any], list[int]]:
    training = Training(name, **EVERY, max_corrections=steps)
    flips = []
    for fault, batch in zip(plan_transients(name, seed, steps), make_batches(steps), strict=True):
        with inject(fault) as injected:
            training.take(batch)
        flips.append(injected.flips)
    return training.digest(), training.findings.findings, flips


def check_transients(ranks: Any, name: str, steps: int, seed: int = 0) -> int:
    """Run a training with a fault per step, and return how many were found."""
    faults = plan_transients(name, seed, steps)
    (expected,) = ranks(partial(undisturbed, name, steps), 1)
    run = partial(train_with_transients, name, seed, steps)
    outcomes = ranks(run, LAYOUTS[name].ranks, timeout=500)
    assert [digest for digest, *_ in outcomes] == [expected] * LAYOUTS[name].ranks
    flips = [sum(of_ranks) for of_ranks in zip(*(flips for *_, flips in outcomes), strict=True)]
    assert flips == [1] * steps
    findings = [found for _, of_rank, _ in outcomes for found in of_rank]
    assert len({finding["step"] for finding in findings}) == len(findings)
    for finding in findings:
        fault = faults[finding["step"]]
        assert (finding["rank"], finding["corrected"]) == (fault.rank, fault.is_own), finding
        assert finding["host"] == os.uname().nodename
        assert finding["core"] in os.sched_getaffinity(0)
        if fault.phase == "forward":
            assert finding["module"] is None, finding
    return len(findings)


@pytest.mark.parametrize("name", ["manual", "attempts", "exact", "1f1b"])
def test_transient_faults(ranks, name):
    assert check_transients(ranks, name, 8, seed=2) >= 7


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAYOUTS)
def test_200_transient_faults(ranks, name):
    """A few faults change no result: a small element of a value that is rounded away."""
    assert check_transients(ranks, name, 220, seed=1) >= 200


# --- faults that last ----------------------------------------------------------------------------

KEPT = ["update", "moment", "sum", "parameter", "optimizer state", "buffer"]
"""Where a fault lasts on one rank: in what it computes for its copy, or in what it holds."""


@contextlib.contextmanager
def spoil_copy(training: Training, kind: str, rank: int, seed: float) -> Any:
    """Let one rank compute an element of its copy wrong in the body, or flip it afterwards."""
    from bit_flips import FaultyOperator, FaultyReduction, flip_bit

    block = next(part for part in training.model if not part.linear.weight.is_meta)
    weight = block.linear.weight
    chosen = {"rank": rank, "call": 0, "seed": seed}
    faults = {
        "update": lambda: FaultyOperator("addcdiv_", **chosen),
        "moment": lambda: FaultyOperator("addcmul_", **chosen),
        "sum": lambda: FaultyReduction(weight, **chosen),
    }
    with faults[kind]() if kind in faults else contextlib.nullcontext():
        yield
    if kind not in faults and ls.rank() == rank:
        optimizer = training.optimizer if training.name == "exact" else training.trainer.optimizer
        moments = optimizer.state[weight]["exp_avg_sq"]
        held = {"parameter": weight, "optimizer state": moments, "buffer": block.mean}
        flip_bit(held[kind], random.Random(seed).randrange(held[kind].numel()))


def train_with_spoilt_copies(name: str, seed: int, steps: int) -> tuple[Any, list[Any], str]:
    """Return the digest, the findings and the error; steps that cannot be repeated raise it."""
    training = Training(name, **EVERY)
    draw = random.Random(seed)
    said = ""
    *batches, last = make_batches(steps)
    try:
        for step, batch in enumerate(batches):
            kind = KEPT[step % len(KEPT)]
            rank = draw.randrange(ls.world_size())
            with spoil_copy(training, kind, rank, draw.random()):
                training.take(batch)
        training.take(last)  # audits what the fault before it has left
    except LockstepError as error:
        said = f"{type(error).__name__}: {error}"
    return training.digest(), training.findings.findings, said


def check_spoilt_copies(ranks: Any, name: str, world: int, steps: int) -> None:
    (expected,) = ranks(partial(undisturbed, name, steps), 1)
    outcomes = ranks(partial(train_with_spoilt_copies, name, 0, steps), world, timeout=500)
    assert [digest for digest, *_ in outcomes] == [expected] * world
    assert [said for *_, said in outcomes] == [""] * world
    draw = random.Random(0)
    spoilt = []
    for step in range(steps - 1):
        spoilt.append((step + 1, draw.randrange(world)))
        draw.random()
    assert [(finding["step"], finding["rank"]) for finding in outcomes[0][1]] == spoilt
    assert all(finding["corrected"] for finding in outcomes[0][1])


def test_a_replica_is_restored_in_attempts(ranks):
    check_spoilt_copies(ranks, "attempts", 3, len(KEPT) + 1)


@pytest.mark.stress
@pytest.mark.parametrize(("name", "world"), [("attempts", 3), ("replicas", 6)])
def test_60_faults_that_last_on_one_rank(ranks, name, world):
    check_spoilt_copies(ranks, name, world, 61)


@pytest.mark.parametrize(("name", "world"), [("manual", 2), ("exact", 2), ("replicas", 4)])
def test_a_copy_that_cannot_be_restored_ends_the_training(ranks, name, world):
    found = ranks(partial(train_with_spoilt_copies, name, 0, 3), world)
    for *_, said in found:
        assert re.match(r"DisagreementError: [\w.]*linear\.\w+ has other values on rank", said), (
            said
        )
        assert "in step 1" in said


# --- permanent faults ----------------------------------------------------------------------------

PERMANENT = {
    "forward": ("addmm", {"element": 5}),
    "backward": ("tanh_backward", {"element": 3}),
    "above a value": ("addmm", {"above": 0.2}),
    "often": ("tanh", {"probability": 0.9, "seed": 1}),
}


class Cores:
    """Two cores, between which only the audit moves the computation."""

    here = 0

    def find(self) -> int:
        return self.here

    def move(self) -> Any:
        return self.stay(1 - self.here)

    @contextlib.contextmanager
    def stay(self, core: int) -> Any:
        before = self.here
        self.here = core
        yield
        self.here = before


def train_with_permanent_fault(name: str, kind: str) -> tuple[Any, str]:
    import bit_flips

    training = Training(name, **EVERY)
    cores = Cores()
    operator, chosen = PERMANENT[kind]
    first, second = make_batches(2)
    training.take(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_audit, "on_another_core", cores.move)
        patch.setattr(call_audit, "on_core", cores.stay)
        for module in (call_audit, bit_flips):
            patch.setattr(module, "find_core", cores.find)
        with (
            bit_flips.FaultyOperator(operator, rank=1, cores={0}, **chosen),
            pytest.raises(LockstepError) as raised,
        ):
            training.take(second)
    return training.digest(), f"{raised.type.__name__}: {raised.value}"


def check_permanent_fault(ranks: Any, name: str, kind: str) -> None:
    (expected,) = ranks(partial(undisturbed, name, 1), 1)
    world = LAYOUTS[name].ranks
    operator = PERMANENT[kind][0]
    for digest, said in ranks(partial(train_with_permanent_fault, name, kind), world):
        assert digest == expected
        place = r"WorkError: step 1, micro-batch \d: rank 1 \(host [^,]*, core 0\)"
        assert re.match(place, said), said
        assert f"first in aten.{operator}" in said, said


@pytest.mark.parametrize("name", ["manual", "1f1b"])
def test_a_permanent_fault_ends_the_training_before_the_step(ranks, name):
    check_permanent_fault(ranks, name, "above a value")


@pytest.mark.stress
@pytest.mark.parametrize("kind", PERMANENT)
@pytest.mark.parametrize("name", LAYOUTS)
def test_permanent_faults(ranks, name, kind):
    check_permanent_fault(ranks, name, kind)


def train_on_cores_that_are_all_wrong(name: str) -> tuple[Any, str, list[Any]]:
    from bit_flips import FaultyOperator

    training = Training(name, **EVERY)
    first, second = make_batches(2)
    training.take(first)
    with FaultyOperator("addmm", rank=1, seed=5), pytest.raises(LockstepError) as raised:
        training.take(second)
    said = f"{raised.type.__name__}: {raised.value}"
    return training.digest(), said, training.findings.findings


@pytest.mark.parametrize("name", ["manual", "exact", "1f1b"])
def test_a_rank_that_is_wrong_at_random_on_all_its_cores_is_named(ranks, name):
    (expected,) = ranks(partial(undisturbed, name, 1), 1)
    found = ranks(partial(train_on_cores_that_are_all_wrong, name), LAYOUTS[name].ranks)
    for digest, said, _ in found:
        assert digest == expected
        place = r"WorkError: step 1, micro-batch \d: rank 1 \(host [^,]*, cores? \d+( and \d+)?\) "
        assert re.match(place + "computed different results from the same inputs", said), said
        assert "first in aten.addmm" in said, said
    findings = [finding for _, _, of_rank in found for finding in of_rank]
    (finding,) = findings
    named = finding["step"], finding["rank"], finding["core"], finding["corrected"]
    assert named == (1, 1, -1, False)
    assert finding["operator"] == "aten.addmm"
