"""What recording costs a step, and how long a record of a million steps takes to render.

    python benchmarks/recording.py [--steps 1000000]

Three measurements: the time of one line; what recorder and progress take of steps
of 5 ms; a long record, rendered.
"""

import argparse
import io
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from lockstep.record.progress import Progress
from lockstep.record.recorder import Recorder

STEP = 0.005
TURNS = 12
STEPS_A_TURN = 100
FILES = ("record.jsonl", "report.html")


def fields(step, ranks=2):
    rows = [[0.0034 + step % 7 * 1e-5, 0.0011234, 0.0003456, 0.0001] for _ in range(ranks)]
    return {
        "step": step, "epoch": step // 1000, "loss": 2 * math.exp(-step / 3e5) + step % 11 / 100,
        "samples": 128, "metrics": {"accuracy": 0.9734}, "seconds": 0.0051234 + step % 13 * 1e-5,
        "lr": 0.01, "ranks": rows, "norm": 1.25 + step % 17 / 100,
        "loss_hex": (2.5 + step % 7 / 9).hex(), "norm_hex": (1.25 + step % 17 / 9).hex(),
        "losses": [(2.5 + step % (7 + each) / 9).hex() for each in range(8)],
        "batch": f"{step * 0x9E3779B97F4A7C15 % 2**64:016x}",
    }  # fmt: skip


def line_cost(ranks):
    """Return the median microseconds of one step's line, over blocks of 500."""
    given = fields(7, ranks)
    costs = []
    with tempfile.TemporaryDirectory() as folder, Recorder(Path(folder)) as recorder:
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(500):
                recorder.write("step", **given)
            costs.append((time.perf_counter() - began) / 500)
    return statistics.median(costs) * 1e6


def busy_step():
    """Compute for 5 ms of this thread's own time."""
    until = time.thread_time() + STEP
    while time.thread_time() < until:
        math.sqrt(2.0)


def turn(writers):
    """Return what `writers` take of a hundred steps of 5 ms, as a share of the steps.

    In the thread's own processor time, so that a busy machine does not count.
    """
    taken = 0.0
    for step in range(STEPS_A_TURN):
        busy_step()
        given = fields(step)
        began = time.thread_time()
        for writer in writers:
            writer(**given)
        taken += time.thread_time() - began
    return taken / (STEP * STEPS_A_TURN)


def shares():
    """Return the shares that the recorder, and recorder and progress take, turn by turn."""
    with tempfile.TemporaryDirectory() as folder, Recorder(Path(folder)) as recorder:
        progress = Progress(epochs=1, stream=io.StringIO())
        progress.begin_epoch(0, STEPS_A_TURN * TURNS, 0)
        write = partial(recorder.write, "step")
        turns = [(turn([write]), turn([write, progress.step])) for _ in range(TURNS)]
    return zip(*turns, strict=True)


def render(steps):
    """Report on `steps` steps; return record's and page's bytes, wall and processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "long"
        with Recorder(place) as recorder:
            recorder.write("run", recipe="benchmark", epochs=steps // 1000)
            for step in range(steps):
                recorder.write("step", **fields(step))
            recorder.write("end", state="done", digest="0" * 64)
        command = [sys.executable, "-m", "lockstep", "report", str(place)]
        began = time.perf_counter()
        before = os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall = time.perf_counter() - began
        after = os.times()
        own = after.children_user + after.children_system
        own -= before.children_user + before.children_system
        return *((place / name).stat().st_size for name in FILES), wall, own


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    for ranks in (1, 2, 4, 16):
        print(f"a step's line, {ranks:2} ranks     {line_cost(ranks):6.1f} us")
    for name, turns in zip(("recorder", "recorder and progress"), shares(), strict=True):
        percents = sorted(100 * one for one in turns)
        print(
            f"of a 5 ms step, {name} take {statistics.median(percents):.2f}% "
            f"(median of {TURNS} turns; {percents[0]:.2f}% to {percents[-1]:.2f}%)"
        )
    record, page, wall, own = render(steps)
    print(
        f"{steps:,} steps: record {record / 1e6:.0f} MB, page {page / 1e3:.0f} kB, "
        f"rendered in {wall:.1f} s ({own:.1f} s of processor time)"
    )


if __name__ == "__main__":
    main()
