"""What recording costs a step, and how long a record of a million steps takes to render.

    python benchmarks/recording.py [--steps 1000000]

Four measurements: the time of one line; what recorder and progress take of steps
of 5 ms; what the timeline of two stages with 8 micro-batches takes of them; a long
record, rendered.
"""

import argparse
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lockstep.kernel.step import find_active
from lockstep.pipeline.stage_span import StageSpan
from lockstep.record.progress import Progress
from lockstep.record.recorder import Recorder
from lockstep.training.history import History
from lockstep.training.step_trace import StepTrace, make_span_row, make_timeline_rows

STEP = 0.005
TURNS = 12
STEPS_A_TURN = 100
ACTIONS = 16  # of a rank: 8 micro-batches, forward and backward
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
            writer.write("step", **given)
        taken += time.thread_time() - began
    return taken / (STEP * STEPS_A_TURN)


def shares():
    """Return the shares that the recorder, and recorder and progress take, turn by turn."""
    with tempfile.TemporaryDirectory() as folder, Recorder(Path(folder)) as recorder:
        progress = Progress(epochs=1, steps=STEPS_A_TURN * TURNS, stream=io.StringIO())
        turns = [(turn([recorder]), turn([recorder, progress])) for _ in range(TURNS)]
    return zip(*turns, strict=True)


def action(watched, spans):
    """Do what a rank does around an action, traced or not: see pipeline/schedule_executor.py."""
    begun = time.perf_counter()
    if watched:
        spans.append(StageSpan("forward", 1, 5, begun, time.perf_counter(), 0.001, 0, 65536))


def timeline_turn(recorder, sees):
    """Return the processor time that the timelines of 1,000 steps of 16 actions take, a step."""
    trace = [StepTrace(0.0, History())]
    taken = 0.0
    for step in range(1000):
        if step % 10 == 0:
            busy_step()  # the caches of a real step
        began = time.thread_time()
        spans, watched = [], sees and bool(find_active(trace, step))
        for _ in range(ACTIONS):
            action(watched, spans)
        if watched:
            message = json.dumps([[0.0, [make_span_row(span, 0.0) for span in spans]]])
            traced = json.loads(message) * 2  # what a rank reads: of two ranks, as one
            ranks = make_timeline_rows(traced, (1.0, 2.0, 3.0))
            recorder.write("timeline", step=step, ranks=ranks)
        taken += time.thread_time() - began
    return taken / 1000


def timeline_shares():
    """Return the shares of a 5 ms step that the timeline takes, turn by turn."""
    found = []
    with tempfile.TemporaryDirectory() as folder, Recorder(Path(folder)) as recorder:
        for _ in range(TURNS):
            with_it, without = timeline_turn(recorder, True), timeline_turn(recorder, False)
            found.append((with_it - without) / STEP)
    return found


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
        began, before = time.perf_counter(), os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall, after = time.perf_counter() - began, os.times()
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
    percents = sorted(100 * one for one in timeline_shares())
    print(
        f"of a 5 ms step with two stages and {ACTIONS} actions, the timeline takes "
        f"{statistics.median(percents):.2f}% (mean of 1,000 steps; {percents[0]:.2f}% to "
        f"{percents[-1]:.2f}%)"
    )
    record, page, wall, own = render(steps)
    print(
        f"{steps:,} steps: record {record / 1e6:.0f} MB, page {page / 1e3:.0f} kB, "
        f"rendered in {wall:.1f} s ({own:.1f} s of processor time)"
    )


if __name__ == "__main__":
    main()
