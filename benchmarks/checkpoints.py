"""What a checkpoint costs: the stall of training, its size, the steps beside the writing, resuming.

    python benchmarks/checkpoints.py [--ranks 2] [--pairs 30]

The 25 M-parameter model of `benchmarks/step` (six linear layers of 2048), with SGD and AdamW:

- stall: seconds that training waits for the copy, and until the checkpoint is on disk;
- overhead: blocks of steps with one checkpoint, and without one, in pairs whose order
  alternates; the median of their differences with its interval (at least 95%);
- torch.save: what writing the same state costs when training waits for it;
- resuming: seconds from the start of `lockstep run` to the end of the first step, for a new run
  and a resumed one, alternating.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import lockstep as ls

OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
              "adamw": partial(torch.optim.AdamW, lr=1e-4)}  # fmt: skip
WIDTH = 2048
BATCH = 64
STEPS = 8

RESUMED = """
import sys, torch, lockstep as ls
from functools import partial
from benchmarks.checkpoints import model, batch
ls.init()
optimizer = partial(torch.optim.AdamW, lr=1e-4)
config = ls.CheckpointConfig(every_steps=2)
trainer = ls.Trainer(model(), torch.nn.functional.mse_loss, optimizer, checkpoint=config)
is_first = True
for number in range(4 if trainer.resumed_from is None else 8):
    trainer.step(batch(number))
    if is_first and trainer.steps > (trainer.resumed_from or 0):
        is_first = False
        print("first step", flush=True)
trainer.finish()
"""


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def batch(number):
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    return inputs, inputs.flip(1)


def interval(values):
    """Return median and the interval of the median by order statistics (at least 95%)."""
    ordered = sorted(values)
    count = len(ordered)
    k = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return statistics.median(ordered), ordered[k], ordered[count - 1 - k]


def measure(optimizer, pairs, folder):
    """Return stalls, seconds until complete, bytes, and the blocks' times of rank 0."""
    ls.init()
    never = 1 << 40
    config = ls.CheckpointConfig(every_steps=never, folder=folder, keep=1)
    trainer = ls.Trainer(model(), nn.functional.mse_loss, OPTIMIZERS[optimizer], checkpoint=config)
    checkpoints = trainer._run._checkpoints
    writer = checkpoints.writer
    batches = [batch(number) for number in range(STEPS)]
    found = {"stall": [], "seconds": [], "bytes": [], "with": [], "without": [], "torch": []}

    def block(save):
        begun = time.perf_counter()
        for number, each in enumerate(batches):
            if save and number == 1:
                checkpoints._due_since = trainer.steps  # the same on every rank
            trainer.step(each)
        seconds = time.perf_counter() - begun
        writer.wait()
        return seconds

    block(False)
    block(True)
    for pair in range(pairs):
        for save in (True, False) if pair % 2 else (False, True):
            found["with" if save else "without"].append(block(save))
            if save and ls.rank() == 0:
                saved = writer.latest
                found["stall"].append(saved.stall)
                found["seconds"].append(saved.seconds)
                found["bytes"].append(saved.size)
    for _ in range(5):
        state = trainer.state_dict()
        if ls.rank() == 0:
            begun = time.perf_counter()
            with open(Path(folder) / "whole.pt", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            found["torch"].append(time.perf_counter() - begun)
        trainer.step(batches[0])
    trainer.finish()
    return found


def first_step(ranks, script, folder, resumed):
    """Return the seconds from the start of the launcher to the end of the first step."""
    command = [sys.executable, "-m", "lockstep", "run", "-n", str(ranks), "--log-dir", str(folder)]
    command += ["--resume", "new"] if resumed else []
    begun = time.perf_counter()
    with subprocess.Popen([*command, str(script)], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "first step" in line:  # of any rank: all end a step together
                seconds = time.perf_counter() - begun
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    if not resumed:
        (newest,) = (each for each in folder.iterdir() if each.is_dir() and each.name != "new")
        newest.rename(folder / "new")
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=30, help="0 measures resuming only")
    options = parser.parse_args()
    for optimizer in OPTIMIZERS if options.pairs else ():
        with tempfile.TemporaryDirectory() as folder:
            arguments = (optimizer, options.pairs, folder)
            ranks = ls.launch(measure, arguments, nprocs=options.ranks)
        found = ranks[0]
        step = statistics.median(found["without"]) / STEPS
        parts = zip(found["with"], found["without"], strict=True)
        cost, low, high = interval([a - b for a, b in parts])
        stall, *spread = interval(found["stall"])
        print(
            f"{optimizer}: {found['bytes'][0] / 1e6:.0f} MB, step {step * 1e3:.0f} ms, "
            f"stall {stall * 1e3:.0f} ms ({spread[0] * 1e3:.0f} to {spread[1] * 1e3:.0f}), "
            f"complete after {statistics.median(found['seconds']) * 1e3:.0f} ms; "
            f"a block of {STEPS} steps with one checkpoint "
            f"{cost * 1e3:+.0f} ms ({low * 1e3:+.0f} to {high * 1e3:+.0f}); "
            f"torch.save {statistics.median(found['torch']) * 1e3:.0f} ms"
        )
    times = {False: [], True: []}
    for _ in range(5):
        with tempfile.TemporaryDirectory() as name:
            script = Path(name) / "script.py"
            script.write_text(RESUMED)
            folder = Path(name) / "runs"
            folder.mkdir()
            os.environ["PYTHONPATH"] = os.pathsep.join(
                [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
            )
            for resumed in (False, True):
                times[resumed].append(first_step(options.ranks, script, folder, resumed))
    print(json.dumps({"new": times[False], "resumed": times[True]}))
    print(
        f"first step after {statistics.median(times[False]):.2f} s, "
        f"resumed {statistics.median(times[True]):.2f} s"
    )


if __name__ == "__main__":
    main()
