"""A training whose ranks kill themselves at chosen points, and what it is compared with.

PLAN is a JSON list of [point, ranks, skip]: the next entry is due once a later round has all of
the ranks again. Then each of these ranks kills itself when it comes to the point, after it has
been there `skip` times; rank -N does not die, but loses a peer there. A file per kill tells all
processes which entries are done, and when.
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
import json, os, signal, sys, time
from functools import partial
from pathlib import Path
import torch
from torch import nn
import lockstep as ls
from lockstep.comm import collectives
from lockstep.comm.backend_errors import PeerLostError
from lockstep.elastic import membership as membership_module
from lockstep.elastic.membership import Membership, membership
from lockstep.launcher import world as world_module
from lockstep.kernel.buffers import Buffers
from lockstep.record.recorder import Recorder
from lockstep.training import round_entry
from lockstep.training.script_loop import whole_batch
from lockstep.training.round_entry import RoundEntry

PLAN = json.loads(os.environ.get("PLAN", "[]"))
FULL, WORKERS, FORM = int(os.environ["FULL"]), int(os.environ["WORKERS"]), os.environ["FORM"]
MARKS = Path("marks")
skipped = 0


def next_entry():
    for number, (point, ranks, skip) in enumerate(PLAN):
        left = [rank for rank in ranks if not (MARKS / f"{number}-{rank}").exists()]
        if left:
            return number, point, left, skip
    return None


def at(point):
    global skipped
    entry = next_entry() if PLAN and not torch.utils.data.get_worker_info() else None
    if entry is None or entry[1] != point or not {ls.rank(), -ls.rank()} & {*entry[2]}:
        return
    number, now = entry[0], membership().round
    earlier = [int(path.read_text()) for path in MARKS.glob(f"{number - 1}-*[0-9]")]
    is_first = len(entry[2]) == len(PLAN[number][1])
    if is_first and (ls.world_size() != FULL or any(now <= each for each in earlier)):
        return
    skipped += 1
    if skipped > entry[3]:
        is_killed = ls.rank() in entry[2]
        mark = MARKS / f"{number}-{ls.rank() if is_killed else -ls.rank()}"
        mark.with_suffix(".new").write_text(str(now))
        mark.with_suffix(".new").rename(mark)
        if is_killed:
            (MARKS / f"killed-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        raise PeerLostError("rank 2 died (process ...)")


def patch(holder, name, before="", after=""):
    function = getattr(holder, name)

    def patched(*args, **options):
        at(before)
        found = function(*args, **options)
        at(after)
        return found

    setattr(holder, name, patched)


def wait_for_newcomers():
    "Go on when the launcher has said that a newcomer is ready, while there is somebody to kill."
    if not PLAN or next_entry() is None or ls.rank() or ls.world_size() == FULL:
        return
    deadline = time.monotonic() + 60
    while not membership().poll():
        assert time.monotonic() < deadline, "no newcomer"
        time.sleep(0.002)


patch(collectives, "_gather_pages", "gather", "gathered")
patch(Membership, "pass_barrier", "prepared", "passed")
patch(Recorder, "write", "record")
patch(Buffers, "merge", "merge", "merged")
patch(whole_batch, "gather_rows", "rows", "rows gathered")
patch(RoundEntry, "_share_state", "sharing", "shared")
patch(round_entry, "send_tensors", "sending")
patch(membership_module, "rejoin", "joining")
world_module.JOIN_TIMEOUT = 600.0


class Samples(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(count, 16, generator=generator)
        self.targets = torch.randint(0, 4, (count,), generator=generator)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        at("item")
        return self.inputs[index] + 0.1 * torch.randn(16), self.targets[index]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(16, 32), nn.BatchNorm1d(32)
        self.drop, self.b = nn.Dropout(0.2), nn.Linear(32, 4)

    def forward(self, inputs):
        at("forward" if self.training else "evaluation")
        if self.training:
            with open(f"computed-{os.getpid()}", "a") as computed:
                print(inputs.double().square().sum().item().hex(), file=computed)
        hidden = self.drop(torch.relu(self.norm(self.a(inputs))))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: at("backward"))
        return self.b(hidden)


class AdamW(torch.optim.AdamW):
    def step(self, closure=None):
        at("optimizer")
        found = super().step(closure)
        at("stepped")
        return found


class Counter:
    count = 0

    def on_step(self, result):
        at("callback")
        self.count += 1

    def on_epoch(self, result):
        at("epoch")

    def state_dict(self):
        at("stateful")
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def train_in_a_loop():
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    exact = ls.exact(
        model, optimizer, microbatches=8, seed=3, scheduler=scheduler, progress=False,
        checkpoint=ls.CheckpointConfig(every_steps=5) if FORM == "nested" else None,
        stateful={"average": average}, loggers="recorded", audit=AUDIT,
    )
    for epoch in range(STEPS // 4):
        for batch in exact.batches(Samples(96), 24, epoch=epoch, num_workers=WORKERS):
            for inputs, targets in batch:
                batch.backward(loss(model(inputs), targets))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            average.update_parameters(model)
            at("callback")
            wait_for_newcomers()
        exact.evaluate(Samples(40), 20, loss=loss)
        at("epoch")
    exact.finish()
    return exact, exact.digest(), exact.optimizer_digest(), ls.digest(average), scheduler


ls.init(timeout=60)
torch.manual_seed(1)
counter, loss = Counter(), nn.CrossEntropyLoss()
AUDITS = {"": True, "0": False, "1": ls.AuditConfig(every_steps=1)}
AUDIT = AUDITS[os.environ["AUDIT"]]
model = Model()
STEPS = int(os.environ["STEPS"])
if FORM in ("nested", "unsaved"):
    exact, *digest, scheduler = train_in_a_loop()
    print("DIGEST", *digest, exact.steps, scheduler.get_last_lr()[0].hex(), flush=True)
    sys.exit()
checkpoint = ls.CheckpointConfig(every_steps=5, stateful={"counter": counter})
trainer = ls.Trainer(
    model, loss,
    ls.OptimizerConfig(
        partial(AdamW, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
    ),
    microbatches=8, seed=3, max_grad_norm=1.0, ema_decay=0.9, callbacks=counter, loggers="recorded",
    checkpoint=checkpoint if FORM == "checkpoint" else None, progress=False, audit=AUDIT,
)
with trainer:
    if FORM == "raw":
        generator = torch.Generator().manual_seed(7)
        for _ in range(STEPS):
            inputs = torch.randn(24, 16, generator=generator)
            trainer.step((inputs, (inputs[:, 0] > 0).long()))
            wait_for_newcomers()
    else:
        for epoch in range(STEPS // 4):
            for batch in trainer.batches(Samples(96), 24, num_workers=WORKERS):
                if FORM == "attempts":
                    for attempt in trainer.attempts(batch):
                        with attempt as step:
                            rows = []
                            assert step.total(lambda data: len(data[1])) == 24
                            for inputs, targets in step.microbatches():
                                rows.append((model(inputs), targets))
                                step.backward(loss(*rows[-1]))
                            rows = [step.gather(column) for column in map(list, zip(*rows))]
                    assert abs(loss(*rows).item() - step.result.loss) < 1e-4
                else:
                    trainer.step(batch)
                wait_for_newcomers()
            trainer.evaluate(Samples(40), 20)
            trainer.save_weights("weights.safetensors")
    assert ls.rank() or ls.world_size() == 1 or counter.count <= STEPS
digest = [trainer.digest(), trainer.optimizer_digest(), ls.digest(trainer.ema_model.state_dict())]
links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)]
print("STORES", sum("lockstep-store" in link for link in links), flush=True)
print("DIGEST", *digest, trainer.steps, trainer.scheduler.get_last_lr()[0].hex(), flush=True)
"""


@dataclass(frozen=True)
class Training:
    """What a training printed and recorded: digests, losses, rounds, evaluations.

    Attributes:
        computed: For each process that was not killed, the micro-batches that it has computed.
    """

    output: str
    digests: set[str]
    losses: list[tuple[int, str]]
    rounds: list[dict[str, Any]]
    evaluations: list[Any]
    computed: dict[str, list[str]]


def train(
    folder: Path,
    plan: list[Any],
    *,
    full: int = 3,
    form: str = "step",
    steps: int = 16,
    workers: int = 0,
    is_random: bool = False,
    timeout: float = 200.0,
    audit: str = "",
) -> Training:
    """Run the training in a folder of its own; with a plan, as an elastic run of `full` ranks.

    Its audits are those of the default; those of each step with `audit` "1", none with "0".
    """
    folder.mkdir()
    (folder / "marks").mkdir()
    (folder / "train.py").write_text(SCRIPT)
    options = ["--min", "1", "--max", str(full)] if plan else ["-n", "1"]
    numbers = {"FULL": full, "STEPS": steps, "WORKERS": workers}
    environ = {**os.environ, "PLAN": json.dumps(plan), "FORM": form, "AUDIT": audit}
    environ |= {name: str(value) for name, value in numbers.items()}
    with warm.Popen(
        [*CLI, *options, "train.py"],
        cwd=folder,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 0, output
    marks = {path.name for path in (folder / "marks").iterdir()}
    due = {f"{n}-{rank}" for n, (_, ranks, _) in enumerate(plan) for rank in ranks}
    if is_random:  # a plan may ask for newcomers where new processes have replaced all
        due = {mark for mark in due if int(mark.partition("-")[0]) < 3}
    assert marks >= due, f"{sorted(due - marks)} never came: {output}"
    record = (folder / "recorded/record.jsonl").read_text()
    lines = [json.loads(line) for line in record.splitlines()]
    assert lines[-1]["kind"] == "end"
    assert lines[-1]["state"] == "done"
    assert all(int(count) <= 2 for count in re.findall(r"STORES (\d+)", output)), output
    assert lines[-1]["digest"] in output  # also where another rank than the first wrote it
    losses: list[tuple[int, str]] = []
    epochs: list[Any] = []
    for line in lines:
        if line["kind"] == "step":
            losses.append((line["step"], line["loss_hex"]))
        elif line["kind"] == "epoch":
            epochs.append((line["epoch"], (line.get("evaluation") or {}).get("loss")))
        elif line["kind"] == "round":
            losses = [each for each in losses if each[0] < line["step"]]
            del epochs[line["epochs"] :]
    rounds = [line for line in lines if line["kind"] == "round"]
    computed = {
        path.name: path.read_text().split()
        for path in folder.glob("computed-*")
        if not (folder / "marks" / path.name.replace("computed", "killed")).exists()
    }
    return Training(
        output, set(re.findall(r"DIGEST (.*)", output)), losses, rounds, epochs, computed
    )
