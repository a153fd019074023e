"""Programs with hidden state, of kinds that users have written: found by the audit alone.

Every other hook of the step is removed, so no special check can find them.

    python -m tests.audit.test_audit_alone      # the table in benchmarks/audit.md
"""

from __future__ import annotations

import re
from functools import partial

import numpy
import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.audit.audit_hook import Audit
from lockstep.audit.call_audit_hook import CallAuditHook

STEPS = 30


class Recurrent(nn.Module):
    """Keeps its hidden state in an attribute, which forward replaces."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 8, batch_first=True)
        self.head = nn.Linear(8, 4)
        self.hidden = None

    def forward(self, inputs):
        outputs, hidden = self.gru(inputs.unsqueeze(1), self.hidden)
        self.hidden = hidden.detach()
        return self.head(outputs[:, 0])


class Late(nn.Module):
    """Changes its behavior after 12 calls, for which it counts in a buffer."""

    lockstep_buffer_rules = {"calls": "equal"}

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.key = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.generator = torch.Generator().manual_seed(0)
        self.rows = []

    def forward(self, inputs):
        self.calls += 1
        return self.compute(inputs) if self.calls > 4 else self.query(inputs)


class LateGenerator(Late):
    """Draws from a generator of its own."""

    def compute(self, inputs):
        return self.query(inputs * torch.rand(4, generator=self.generator))


class LateTeacher(Late):
    """Writes to a parameter in forward."""

    def compute(self, inputs):
        self.key.weight.detach().lerp_(self.query.weight.detach(), 0.1)
        return self.query(inputs) + self.key(inputs)


class LateQueue(Late):
    """Appends its inputs to a list, and reads it."""

    def compute(self, inputs):
        self.rows = [*self.rows[-3:], inputs.detach().mean(0)]
        return self.query(inputs + sum(self.rows))


class Plain(nn.Linear):
    """Is blameless; its loss is not."""

    def __init__(self):
        super().__init__(4, 4)


class Counting:
    """A loss that depends on the number of its calls."""

    calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets) * (1 + 0.01 * (self.calls % 5))


generator = numpy.random.default_rng(0)


def draw_loss(outputs, targets):
    """Smooth labels by a number of a generator of numpy's own."""
    smoothing = float(generator.random()) / 10
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=smoothing)


PROGRAMS = {
    "recurrent": (Recurrent, nn.CrossEntropyLoss, 0, "of gru .*; Recurrent.hidden changed"),
    "late generator": (LateGenerator, nn.CrossEntropyLoss, 10, "LateGenerator.generator changed"),
    "late teacher": (LateTeacher, nn.CrossEntropyLoss, 5, "in aten.lerp_.Scalar of LateTeacher"),
    "late queue": (LateQueue, nn.CrossEntropyLoss, 5, "LateQueue.rows changed"),
    "counting loss": (Plain, Counting, 2, r"in aten.mul.Tensor \(.* in __call__\)"),
    "drawing loss": (Plain, lambda: draw_loss, 2, r"\(.* in draw_loss\)"),
}
"""The model and the loss, the last step in which it is found, and a part of what is named."""


IN_CALLS = {
    "recurrent": ".hidden changed",
    "late generator": ".generator changed",
    "late teacher": "first in aten.lerp_",
    "late queue": ".rows changed",
}
"""What manual steps and stages name; they repeat no loss."""


def train_audited_only(name, kind="step"):
    """Train a program with the audit alone; return the steps taken, and the error.

    Args:
        name: The program.
        kind: "step", "manual", or "stages", of which the first one is the program.
    """
    make, make_loss, *_ = PROGRAMS[name]
    torch.manual_seed(0)
    model = make()
    loss = make_loss()
    pipeline = None
    if kind == "stages":
        model = nn.Sequential(model, nn.Linear(4, 4))
        pipeline = ls.PipelineConfig(stages=2, balance=[1, 1])
    sgd = partial(torch.optim.SGD, lr=0.1)
    options = {"microbatches": 4, "loggers": []}
    trainer = ls.Trainer(model, loss, sgd, pipeline=pipeline, **options)
    step = trainer._steps.optimizer_step
    audit = Audit if kind == "step" else CallAuditHook
    step.hooks = [hook for hook in step.hooks if isinstance(hook, audit)]
    assert len(step.hooks) == 1
    draw = torch.Generator().manual_seed(1)
    try:
        for _ in range(STEPS):
            batch = torch.rand(16, 4, generator=draw), torch.arange(16) % 4
            if kind != "manual":
                trainer.step(batch)
                continue
            with trainer.manual_step() as opened:
                for inputs, targets in opened.microbatches(batch):
                    opened.backward(loss(trainer.model(inputs), targets))
    except ls.LockstepError as error:
        return trainer.steps, f"{type(error).__name__}: {error}"
    return trainer.steps, ""


@pytest.mark.stress
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_hidden_state_is_found_by_the_audit_alone(name, n, ranks):
    *_, step, named = PROGRAMS[name]
    for found, error in ranks(partial(train_audited_only, name), n):
        assert error.startswith("StateError: "), error
        assert found <= step, error
        assert re.search(named, error), error


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["manual", "stages"])
@pytest.mark.parametrize("name", IN_CALLS)
def test_hidden_state_in_a_call_is_found_by_the_audit_alone(name, kind, ranks):
    for found, error in ranks(partial(train_audited_only, name, kind), 2):
        assert error.startswith("StateError: "), error
        assert found == (0 if name == "recurrent" else 5), error
        assert IN_CALLS[name] in error, error


def print_table() -> None:
    """Train each program in each way, and print a row for it."""
    ways = [("step", 1), ("step", 2), ("step", 3), ("manual", 2), ("stages", 2)]
    print("| program | step on 1, 2 and 3 ranks | manual step | 2 stages | what is named |")
    print("|---|---|---|---|---|")
    for name in PROGRAMS:
        found = [ls.launch(train_alone, (name, kind), nprocs=n)[0] for kind, n in ways]
        steps = [str(step) if error else "not found" for step, error in found]
        patterns = r"first in (aten[\w.]+)", r"( of [\w.]+) \(", r"(; [\w., ]+) changed"
        named = "".join("".join(re.findall(pattern, found[0][1])) for pattern in patterns)
        print(f"| {name} | {', '.join(steps[:3])} | {steps[3]} | {steps[4]} | {named} |")


def train_alone(name: str, kind: str) -> tuple[int, str]:
    """Train a program in a new process."""
    ls.init()
    return train_audited_only(name, kind)


if __name__ == "__main__":
    print_table()
