"""A training whose processes are replaced, since they cannot go on in place; ranks kill themselves.

KILLS lists where: "forward:5:1" is in the forward of step 5 on rank 1; each kills once. Of the
ranks that one entry names ("forward:5:1,2") the first one that comes there kills all. With STOPS,
the launcher is asked to stop at the same moment. With SCALE, it is asked for that many ranks after
step 4.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm

CLI = [*warm.LOCKSTEP, "run"]

SCRIPT = """
import json, os, signal, time
from functools import partial
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep as ls
from lockstep.elastic.membership import membership
from lockstep.elastic.scale_request import request_ranks

LAYOUT, FORM = json.loads(os.environ["LAYOUT"]), os.environ["FORM"]
KILLS = [kill.split(":") for kill in os.environ.get("KILLS", "").split()]
trainer = None


def at(point):
    steps = 0 if trainer is None else trainer.steps
    for number, (where, step, dying) in enumerate(KILLS):
        ranks, mark = dying.split(","), Path(f"killed-{number}")
        if where != point or int(step) != steps or str(ls.rank()) not in ranks or mark.exists():
            continue
        mark.touch()
        if "STOPS" in os.environ:
            stat = Path(f"/proc/{os.getppid()}/stat").read_text()  # of the fork server
            os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGTERM)
        for rank in {*ranks} - {str(ls.rank())}:
            os.kill(int(Path(f"pid-{rank}").read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)  # a successor may have written this one's file


class Probe(nn.Module):
    def forward(self, inputs):
        at("forward" if self.training else "evaluation")
        outputs = inputs * 1
        if outputs.requires_grad:
            outputs.register_hook(lambda _: at("backward"))
        return outputs


class AdamW(torch.optim.AdamW):
    lockstep_elementwise = True

    def step(self, closure=None):
        if trainer is None:  # it finds out what the optimizer keeps
            return super().step(closure)
        at("optimizer")
        found = super().step(closure)
        at("stepped")
        return found


def make_optimizer(parameters):
    if LAYOUT.get("storage") not in ("sharded", "hybrid"):
        return AdamW(parameters, lr=0.01)
    optimizer = torch.optim.AdamW(parameters, lr=0.01)  # only torch's steps shards of any size
    for register, point in (
        (optimizer.register_step_pre_hook, "optimizer"),
        (optimizer.register_step_post_hook, "stepped"),
    ):
        hook = partial(lambda point, *_: at(point), point)
        hook.lockstep_elementwise = True
        register(hook)
    return optimizer


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.layer(inputs)


def data(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 4, (samples,), generator=generator))


def scale():
    "Ask for another number of ranks, once, and go on when the launcher has said so to rank 0."
    if "SCALE" not in os.environ or trainer.steps != 5 or Path("scaled").exists():
        return
    if ls.rank() == 0:
        request_ranks(Path(os.environ["LOCKSTEP_RUN"]), int(os.environ["SCALE"]))
        deadline = time.monotonic() + 60
        while not membership().poll():
            assert time.monotonic() < deadline, "the request was not read"
            time.sleep(0.002)
        Path("scaled").touch()


Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
ls.init(backend=LAYOUT.get("backend"), timeout=60)
torch.manual_seed(1)
at("start")
model = nn.Sequential(
    nn.Linear(8, 16), nn.BatchNorm1d(16), Probe(), nn.Dropout(0.2), nn.Linear(16, 16), Probe(),
    nn.ReLU(), nn.Linear(16, 4),
)
judge = Judge()
stateful, checkpoint = {}, None
if FORM == "two":
    of_judge = ls.Trainer(
        judge, None, partial(torch.optim.SGD, lr=0.1), microbatches=4, loggers=[],
        extra_modules=[model], progress=False,
    )
    stateful = {"judge": of_judge}
if stateful or "every" in LAYOUT:
    checkpoint = ls.CheckpointConfig(every_steps=LAYOUT.get("every", 1000), stateful=stateful)
if LAYOUT.get("storage") == "hybrid":
    os.environ["LOCKSTEP_HOST_IDENTITY"] = f"host {ls.rank() % 2}"
made = ls.Trainer(
    model, nn.CrossEntropyLoss(), ls.OptimizerConfig(
        make_optimizer,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
    ),
    microbatches=4, seed=3, max_grad_norm=1.0, ema_decay=0.9, loggers="recorded",
    extra_modules=[judge] if FORM == "two" else [],
    storage=LAYOUT.get("storage", "replicated"), checkpoint=checkpoint, progress=False,
    # A probe in each stage: a measured partition may leave a rank without one.
    pipeline=ls.PipelineConfig(stages=2, balance=[3, 5]) if LAYOUT.get("stages") else None,
)
trainer = made
Path(f"made-{os.environ.get('LOCKSTEP_MEMBER')}").touch()
if "every" in LAYOUT:
    made.history._on_step.append(lambda result: made._run._checkpoints.writer.wait())
if made.resumed_from is not None:
    at("answering")
seen = []
with made:
    for epoch in range(3):
        for batch in made.batches(data(48, 5), 12, epoch=epoch):
            if FORM == "two":
                with of_judge.manual_step() as step:
                    for inputs, _ in step.microbatches(batch):
                        step.backward(judge(model(inputs).detach()).square().mean())
            made.step(batch)
            at("body")
            scale()
        seen.append(made.evaluate(data(20, 6), 10).loss.hex())
    at("digest")
    digest = made.digest()
    found = [digest, made.optimizer_digest(), made.steps, *seen]
    if FORM == "two":
        found.append(of_judge.digest())
print("DIGEST", *found, flush=True)
"""


@dataclass(frozen=True)
class Training:
    """What a training printed and recorded: its results, the launcher's sentences, the rounds."""

    results: set[str]
    said: list[str]
    rounds: list[dict[str, Any]]
    repeated: list[float]  # seconds of the recorded steps that each round takes again
    repeated_steps: list[int]  # how many these are
    steps: list[int]
    losses: list[str]


def train(
    folder: Path, kills: str = "", *, ranks: int = 1, form: str = "one", **layout: Any
) -> Training:
    """Run the training in a folder of its own, as an elastic run if ranks are to be killed."""
    folder.mkdir()
    options = ["--min", "1", "--max", str(ranks)] if kills else ["-n", str(ranks)]
    status, output, errors = run(folder, [*options, "train.py"], kills, form, layout)
    assert status == 0, output + errors
    return read_training(folder, output, errors)


def run(
    folder: Path,
    arguments: list[str],
    kills: str,
    form: str,
    layout: dict[str, Any],
    **environ: str,
) -> tuple[int, str, str]:
    """Run the training; return the exit status, what ranks printed, and what the launcher said."""
    (folder / "train.py").write_text(SCRIPT)
    environ = {**os.environ, **environ, "KILLS": kills, "FORM": form, "LAYOUT": json.dumps(layout)}
    with warm.Popen(
        [*CLI, *arguments],
        cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            # Longer than the limit of most tests, which then says where they are.
            output, errors = process.communicate(timeout=280.0)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
    marks = {path.name for path in folder.glob("killed-*")}
    assert marks == {f"killed-{number}" for number in range(len(kills.split()))}, output + errors
    return process.returncode, output, errors


def read_training(folder: Path, output: str, errors: str) -> Training:
    """Return what a training has recorded, and what was printed."""
    text = (folder / "recorded/record.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[-1]["state"] == "done"
    steps: dict[int, Any] = {}
    repeated: list[list[float]] = []
    for line in lines:
        if line["kind"] == "resume":
            steps = {number: step for number, step in steps.items() if number < line["step"]}
        elif line["kind"] == "round":
            repeated.append([s["seconds"] for n, s in steps.items() if n >= line["step"]])
            steps = {number: step for number, step in steps.items() if number < line["step"]}
        elif line["kind"] == "step":
            steps[line["step"]] = line
    return Training(
        set(re.findall(r"DIGEST (.*)", output)),
        [line for line in errors.splitlines() if re.search("continues from|killed", line)],
        [line for line in lines if line["kind"] == "round"],
        [*map(sum, repeated)],
        [*map(len, repeated)],
        list(steps),
        [line["loss_hex"] for line in steps.values()],
    )
