"""Records written by hand: small ones for words, long ones for charts."""

import json
import math

from lockstep.launcher.run_folder import RECORD_FILE

HEADER = {
    "kind": "run",
    "version": 1,
    "name": "night",
    "started": "2026-11-21T07:52:00+00:00",
    "command": ["/opt/bin/lockstep", "train", "digits", "-n", "2", "--note", "two words"],
    "recipe": "digits",
    "layout": {
        "world_size": 2, "replicas": 2, "stages": 1, "microbatches": 8,
        "threads": 1, "backend": "gloo", "device": "cpu",
    },
    "options": {"lr": 0.05, "seed": 7},
    "environment": {
        "torch": "2.13.0", "hostname": "elsewhere", "memory_bytes": 8e9,
        "variables": {"OMP_NUM_THREADS": "1"},
    },
    "model": {"class": "Net", "parameters": 21840},
    "epochs": 2,
    "steps_per_epoch": 10,
    "samples": 320,
}  # fmt: skip

END = {
    "kind": "end", "t": 2.0, "state": "done", "digest": "ab" * 32, "optimizer_digest": "cd" * 32,
    "seconds": 2.5, "steps": 20, "samples": 640, "loss": 0.2, "metrics": {"accuracy": 0.9},
}  # fmt: skip


def step(number, per_epoch=10, **fields):
    """Return the line of one step of a run that learns; step 13 is slow, by rank 1's data."""
    slow = 0.09 if number == 13 else 0.0
    return {
        "kind": "step", "t": number * 0.01, "step": number, "epoch": number // per_epoch,
        "loss": 2 * math.exp(-number / 8), "samples": 32,
        "metrics": {"accuracy": 1 - 0.9 * math.exp(-number / 8)},
        "seconds": 0.01 + slow, "lr": 0.05,
        "ranks": [[0.006, 0.002, 0.0019 + slow, 0.0001], [0.007, 0.002, 0.0009, 0.0001 + slow]],
    } | fields  # fmt: skip


def epoch(number, loss=0.3):
    """Return the line of one epoch with its evaluation."""
    return {
        "kind": "epoch", "t": number + 1.0, "epoch": number, "loss": 0.5,
        "metrics": {"accuracy": 0.8}, "samples": 320, "seconds": 0.1,
        "evaluation": {"loss": loss, "metrics": {"accuracy": 0.9125}, "samples": 80},
        "memory_bytes": [300_000_000, 310_000_000],
    }  # fmt: skip


def whole(**header):
    """Return the lines of a run of 20 steps that reached its end."""
    steps = [step(number) for number in range(20)]
    warning = {"kind": "warning", "t": 0.05, "rank": 1, "message": "rank 1 <b>limps</b> & waits"}
    return [HEADER | header, *steps[:10], epoch(0), warning, *steps[10:], epoch(1, 0.25), END]


def checkpoint(number, **fields):
    """Return the line of a checkpoint that holds the state after `number` steps."""
    return {
        "kind": "checkpoint", "t": number * 0.01, "step": number, "stall": 0.002 + number * 1e-4,
        "seconds": 0.04, "bytes": 340_000, "path": f"checkpoints/step-{number}",
    } | fields  # fmt: skip


def resume(number, epochs=0, **fields):
    """Return the line that resumes a run at step `number`."""
    return {
        "kind": "resume", "t": 0.2, "step": number, "epochs": epochs,
        "resumed": "2026-11-22T03:00:00+00:00", "checkpoint": f"checkpoints/step-{number}",
        "command": ["/opt/bin/lockstep", "train", "--resume", "night"], "differences": [],
    } | fields  # fmt: skip


def new_round(number, at, **fields):
    """Return the line that begins round `number` at step `at`; rank 0 writes it."""
    return {
        "kind": "round", "t": at * 0.01, "round": number, "step": at, "world_size": 2, "lost": [],
        "joined": [], "left": [], "undone": 0.0,
        "noticed": 1795245120.5, "continued": 1795245120.75,
    } | fields  # fmt: skip


def elastic():
    """Return the lines of an elastic run on 2 ranks: a death, a newcomer, then a death of rank 0.

    Member 0 died while it wrote the line of a step whose next try another rank recorded.
    """
    lost = [{"member": 1, "signal": 9}]
    alone = [[0.01, 0.0, 0.0, 0.001]]
    return [
        *(HEADER, *map(step, range(6))),
        new_round(1, 6, lost=lost, world_size=1, undone=0.004),
        *(step(number, ranks=alone) for number in range(6, 9)),
        new_round(2, 9, joined=[2], noticed=1795245121.5, continued=1795245121.625),
        *(*map(step, range(9, 10)), epoch(0) | {"t": 0.095}, *map(step, range(10, 14))),
        new_round(
            3, 13, lost=[{"member": 0, "signal": 9}], world_size=1, undone=0.002,
            noticed=1795245122.0, continued=1795245123.25,
        ),
        *(step(number, ranks=alone) for number in range(13, 15)),
        new_round(4, 15, joined=[3], noticed=1795245124.0, continued=1795245124.125),
        *(*map(step, range(15, 20)), epoch(1, 0.25), END),
    ]  # fmt: skip


def resumed():
    """Return the lines of a run on 4 ranks that was killed, and resumed twice on 2 ranks.

    The times by rank differ so much between the layouts that mixing them shows.
    """
    layout = HEADER["layout"] | {"world_size": 4, "replicas": 2, "stages": 2}
    wide = [[0.02, 0.002, 0.001, 0.0]] * 3 + [[0.9, 0.002, 0.001, 0.0]]
    first = [step(number, ranks=wide, seconds=0.92) for number in range(14)]
    differences = ["torch: 2.12.0 before, 2.13.0 now", "cores: 8 before, 2 now"]
    back = resume(12, 1, layout=HEADER["layout"], differences=differences)
    return [
        HEADER | {"layout": layout},
        *first[:10],
        epoch(0) | {"t": 0.095, "memory_bytes": [1e9] * 4},
        *(checkpoint(10), *first[10:12], checkpoint(12), *first[12:], checkpoint(14)),
        *(back, *map(step, range(12, 18)), checkpoint(16)),
        *(resume(16, 1), *map(step, range(16, 20)), epoch(1, 0.25), END),
    ]


def write(folder, lines, tail=""):
    """Write lines as a record into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / RECORD_FILE).write_text(text + tail)
    return folder


class FindingLogger:
    """A logger that keeps the findings of the audit."""

    def __init__(self):
        self.findings = []

    def write(self, kind, **fields):
        if kind == "audit":
            self.findings.append(fields)

    def close(self):
        pass
