"""The planted differences: one script, and what is changed in it.

Each changes lines of the script (its own sources are replayed), or variables of the environment.
The step is STEP where the change allows it, behind the last checkpoint before it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from lockstep.launcher.launch_script import launch_script
from lockstep.tools.commands.run import command, make_config
from lockstep.tools.replay.bisection import Bisection
from lockstep.tools.replay.recorded_run import RecordedRun, read_recorded_run

STEP = 4
MICROBATCH = 2
"""Where most differences are planted; checkpoints hold 3 and 6 steps."""

SCRIPT = """\
import os
from functools import partial

import numpy
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

ls.init(threads=1)
torch.manual_seed(1)
inputs, targets = torch.rand(64, 6), torch.randint(0, 4, (64,))


def is_here(microbatch=None):
    place = trainer.engine.setup.executor.position()
    return trainer.steps == 4 and (microbatch is None or place == (microbatch, 0))


class Squash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


class Middle(nn.Module):
    lockstep_buffer_rules = {"mean": "mean"}

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        y = Squash.apply(x)
        self.mean.lerp_(y.detach().float().mean(), 0.1)
        return nn.functional.dropout(y, 0.2)


class SGD(torch.optim.SGD):
    def step(self, closure=None):
        super().step()


model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), Middle(), nn.Linear(16, 4))
trainer = ls.Trainer(
    model,
    nn.CrossEntropyLoss(),
    partial(SGD, lr=0.1, momentum=0.9),
    microbatches=4,
    audit=False,  # which would name some of the plants before a command can
    seed=3,
    loss_weight=lambda batch: len(batch[0]),
    checkpoint=ls.CheckpointConfig(every_steps=3, keep=9),
)
with trainer:
    for epoch in range(2):
        data = TensorDataset(inputs, targets)
        for batch in trainer.batches(data, 16, seed=7, epoch=epoch):
            trainer.step(batch)
"""

KERNELS_OF_TORCH = {"ls.init(threads=1)": "ls.init(threads=1, portable=False)"}


@dataclass(frozen=True)
class Planted:
    """A difference between two runs, and what is right to say of it.

    Attributes:
        name: What was changed.
        changes: Pieces of the second script's source, and what replaces them.
        step: The step at which it arises.
        direction: As in the contract.
        microbatch: The lowest one that differs; None where it is about none.
        unit: The module; None where it is about none.
        operator: The beginning of its name; None where there is none.
        index: Of the first differing element; None where the sides have no two elements.
        line: A piece of the line of the script that is named; None for no line.
        both: Further changes of both scripts.
        environ: Variables of the second run alone.
        is_quick: Whether it is in the test suite, which has one of each direction, and not only
            in the long tests.
    """

    name: str
    changes: dict[str, str]
    step: int
    direction: str
    microbatch: int | None = None
    unit: str | None = None
    operator: str | None = None
    index: tuple[int, ...] | None = None
    line: str | None = None
    both: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    is_quick: bool = False

    def sources(self) -> tuple[str, str]:
        """Return the scripts of both runs."""
        first = replace(SCRIPT, self.both)
        return first, replace(first, self.changes)

    def check(self, found: Bisection) -> list[str]:
        """Return what is wrong with the divergence; nothing if it is right."""
        divergence = found.divergence
        assert divergence is not None, f"{self.name}: no difference was found"
        element = divergence.element
        pairs = {
            "step": (divergence.step, self.step),
            "direction": (divergence.direction, self.direction),
            "micro-batch": (divergence.microbatch, self.microbatch),
            "module": (divergence.unit, self.unit),
            "operator": (
                (divergence.operator or "")[: len(self.operator or "")],
                self.operator or "",
            ),
            "no operator": (divergence.operator is None, self.operator is None),
            "element": (None if element is None else element.index, self.index),
            "line": (self._is_line(divergence.source), True),
            "replayed": (found.is_replayed, True),
        }
        return [
            f"{name}: {got}, not {right}" for name, (got, right) in pairs.items() if got != right
        ]

    def _is_line(self, source: str | None) -> bool:
        """Return whether the line that was named is the right one, in either script."""
        if self.line is None:
            return True
        number = int((source or "train.py:0").split(":")[1].split(" ")[0])
        lines = [each.splitlines()[number - 1] for each in self.sources()]
        return any(self.line in each for each in lines)


def record(
    folder: Path,
    name: str,
    source: str,
    environ: dict[str, str] | None = None,
    ranks: int = 1,
    resume: bool = False,
) -> RecordedRun:
    """Run a script as `lockstep run` does, and return what it recorded.

    Afterwards the script is another one: replays take the stored sources.

    Args:
        folder: Where script and run are stored.
        name: The name of the run.
        source: The script.
        environ: Variables of the run.
        ranks: The number of ranks.
        resume: Whether the run is there already, and is continued.

    Raises:
        RankError: The script failed.
    """
    script = folder / name / "train.py"
    script.parent.mkdir(exist_ok=resume)
    script.write_text(source)
    runs = folder / "runs"
    words = ["-n", str(ranks), "--log-dir", str(runs)]
    words += ["--resume", str(runs / name)] if resume else ["--name", name]
    params = command.make_context("run", [*words, str(script)]).params
    # As recorded, and so in replays: otherwise each of both needs a fork server of its own.
    with patch.dict(os.environ, {"OMP_NUM_THREADS": "1", **(environ or {})}):
        launch_script(make_config(params.pop("script"), params.pop("arguments"), params))
    script.write_text("raise SystemExit('the script has changed since')\n")
    return read_recorded_run(runs / name)


def replace(source: str, changes: dict[str, str]) -> str:
    """Return a source in which each of some pieces, which occur once, is another one."""
    for old, new in changes.items():
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    return source


AFTER_SQUASH = "        self.mean.lerp_"
LOOP = "            trainer.step(batch)"
MODEL = "model = nn.Sequential"

PLANTED = [
    Planted(
        "another seed", {"seed=3,": "seed=4,"},
        0, "forward", 0, "2", "aten.bernoulli_", index=(0, 2), line="nn.functional.dropout",
    ),
    Planted("another order of data", {"seed=7,": "seed=8,"}, 0, "data", 0, index=(0, 0)),
    Planted(
        "one changed sample", {"\n\n\ndef is_here": "\ninputs[51, 3] += 2**-20\n\n\ndef is_here"},
        1, "data", 2, index=(3, 3), is_quick=True,
    ),
    Planted(
        "dropout drawn one extra time",
        {"        return nn.functional.dropout":
         "        if is_here(2):\n            nn.functional.dropout(y, 0.2)\n"
         "        return nn.functional.dropout"},
        STEP, "forward", MICROBATCH, "2", "aten.bernoulli_", line="nn.functional.dropout(y, 0.2)",
        is_quick=True,
    ),
    Planted(
        "one more thread", {"threads=1": "threads=2"},
        0, "forward", 0, "1", "aten.native_batch_norm", index=(0, 0), line="trainer.step(batch)",
        both=KERNELS_OF_TORCH,
    ),
    Planted(
        "a capped instruction set", {}, 0, "forward", 0, "1", "aten.native_batch_norm",
        index=(0, 0), line="trainer.step(batch)",
        both=KERNELS_OF_TORCH | {  # initial weights and data that every processor computes alike
            "torch.rand(64, 6)": "torch.arange(384).view(64, 6) % 31 / 32",
            "trainer = ls.Trainer": """\
with torch.no_grad():
    for each in model.parameters():
        each.copy_((torch.arange(each.numel()) % 7 - 3).view(each.shape) / 8)
trainer = ls.Trainer""",
        },
        environ={"ATEN_CPU_CAPABILITY": "default"},
    ),
    Planted(
        "a non-deterministic operator", {}, 0, "forward", 0, "2", "planted.noisy",
        index=(0, 0), line="noisy(y)",
        both={
            "class Middle": """\
@torch.library.custom_op("planted::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    noise = numpy.frombuffer(os.urandom(4 * x.numel()), numpy.uint32) / 2**32
    return x * (1 + torch.from_numpy(noise.astype(numpy.float32)).view(x.shape))


noisy.register_autograd(lambda ctx, gradient: gradient)


class Middle""",
            "nn.functional.dropout(y": "nn.functional.dropout(noisy(y)",
        },
        is_quick=True,
    ),
    Planted(
        "a hyperparameter changed from a step on",
        {LOOP: '            if trainer.steps == 4:\n'
               '                trainer.optimizer.param_groups[0]["lr"] = 0.05\n' + LOOP},
        STEP, "optimizer", None, "0", "aten.add_", index=(0, 0), is_quick=True,
    ),
    Planted(
        "a wrong backward of one layer",
        {"        return gradient * (1 - y * y)":
         "        return gradient * (1 - y * y) * (1 + 1e-3 * is_here())"},
        STEP, "backward", 0, "2", "aten.mul", line="return gradient", is_quick=True,
    ),
    Planted(
        "weights written from outside",
        {LOOP: "            if trainer.steps == 4:\n"
               "                model[3].weight.data[1, 2] += 1e-3\n" + LOOP},
        STEP, "state", None, "3", index=(1, 2), is_quick=True,
    ),
    Planted(
        "bf16 against fp32", {"    seed=3,": "    seed=3,\n    autocast_dtype=torch.bfloat16,"},
        0, "forward", 0, "0", "aten._to_copy",
    ),
    Planted(
        "an update applied twice",
        {"        super().step()":
         "        super().step()\n        if trainer.steps == 4:\n            super().step()"},
        STEP, "optimizer", None, "0", "aten.mul_", line="super().step()",
    ),
    Planted(
        "a buffer updated twice",
        {"        return nn.functional.dropout":
         "        if is_here(2):\n            self.mean.lerp_(y.detach().float().mean(), 0.1)\n"
         "        return nn.functional.dropout"},
        STEP, "forward", MICROBATCH, "2", "aten.lerp_", line="self.mean.lerp_",
    ),
    Planted(
        "a changed source line", {"torch.tanh(x)": "torch.tanh(x.clamp(-0.5, 0.5))"},
        0, "forward", 0, "2", "aten.clamp", line="torch.tanh(x",
    ),
    Planted(
        "a changed constant", {"0.5, 0.25": "0.5, 0.5"},
        0, "forward", 0, "2", "aten.lift_fresh", index=(3,), line="torch.tensor([",
        both={"Squash.apply(x)": "Squash.apply(x * torch.tensor([1, 1, 0.5, 0.25] * 4))"},
    ),
    Planted("another batch size", {"data, 16,": "data, 32,"}, 0, "data", 0),
    Planted(
        "a missing micro-batch",
        {"lambda batch: len(batch[0])": "lambda batch: len(batch[0]) * (not is_skipped(batch))",
         "class Squash": """\
def is_skipped(batch):
    return trainer.steps == 4 and bool((batch[0] == inputs[0]).all(1).any())


class Squash"""},
        STEP, "forward", MICROBATCH, is_quick=True,
    ),
    Planted(
        "a changed initial weight",
        {"trainer = ls.Trainer": "model[3].weight.data[1, 2] += 1e-3\ntrainer = ls.Trainer"},
        0, "state", None, "3", index=(1, 2),
    ),
    Planted(
        "another optimizer option", {"momentum=0.9": "momentum=0.8"},
        1, "optimizer", None, "0", "aten.mul_", index=(0, 0),
    ),
    Planted(
        "a flipped bit in an activation",
        {"        return nn.functional.dropout":
         "        if is_here(2):\n"
         "            y.detach().numpy().view(numpy.int32)[1, 6] ^= 1 << 18\n"
         "        return nn.functional.dropout"},
        STEP, "forward", MICROBATCH, "2", index=(1, 6),
    ),
    Planted(
        "a flipped bit in a gradient sum",
        {MODEL: """\
from lockstep.data_parallel.gradient_reducer import GradientReducer

reduce = GradientReducer.reduce


def reduce_wrongly(self, *arguments):
    reduce(self, *arguments)
    if trainer.steps == 4:
        model[3].weight.grad.numpy().view(numpy.int32)[1, 2] ^= 1


GradientReducer.reduce = reduce_wrongly
""" + MODEL},
        STEP, "reduction", None, "3", index=(1, 2), is_quick=True,
    ),
]  # fmt: skip
