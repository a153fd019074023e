"""Lockstep on an accelerator, in one command: what works, with equal bits, and at which speed.

    python dev/gpu_check.py                          everything, about 6 minutes
    python dev/gpu_check.py --parts layouts,speed    some parts
    python dev/gpu_check.py --wheels FOLDER          install missing packages from wheels first

Each part is a process of its own with a time limit, and each of its results is written to
`gpu_check.jsonl` as soon as it is known, so that a part that hangs or crashes hides no other. Some
parts run at the same time, since most of their time is the start of processes; the speed is
measured last, alone. The table is printed at the end. Exit status: 0 if no result is bad.

On a machine without an accelerator, `PYTHONPATH=tests` and `--before simulated.ranks:install` run
the same parts on the simulated one, which shows that they work, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

LIMITS = {
    "install": 90,
    "extension": 200,
    "device": 90,
    "own backend": 60,
    "layouts": 240,
    "resume": 120,
    "commands": 180,
    "elastic": 90,
    "compiled": 180,
    "one process": 60,
    "errors": 150,
    "operators": 90,
    "own loop": 90,
    "sums": 120,
    "speed": 150,
}
"""The parts, and the seconds that each may take."""

ALONE = ("install", "speed")
"""The parts beside which no other runs: the first one and the last one."""

SIGNS = {True: "good", False: "**bad**", None: ""}


def run_part(name: str, options: argparse.Namespace) -> None:
    """Run a part in a process, and end all of its processes after its limit."""
    command = [sys.executable, __file__, "--part", name, "--out", options.out]
    for option in ("before", "wheels"):
        if getattr(options, option):
            command += [f"--{option}", getattr(options, option)]
    print(f"{name} ...", file=sys.stderr, flush=True)
    begun = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMITS[name])
            problem = f"exit status {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            problem = f"not finished after {LIMITS[name]} s"
    if problem:
        last = " / ".join(line.strip() for line in output.splitlines()[-4:])
        write(options.out, name, "the part", f"{problem}: {last}", is_good=False)
    write(options.out, name, "duration", f"{time.monotonic() - begun:.0f} s")


def write(path: str, part: str, what: str, result: str, *, is_good: bool | None = None) -> None:
    """Append a result to the file."""
    line = {"part": part, "what": what, "result": result, "good": is_good}
    with Path(path).open("a") as file:
        file.write(json.dumps(line) + "\n")


def format_table(path: str) -> str:
    """Return the results of a file as a table."""
    lines = ["| part | what | result | |", "|---|---|---|---|"]
    rows = [json.loads(text) for text in Path(path).read_text().splitlines()]
    for row in sorted(rows, key=lambda row: list(LIMITS).index(row["part"])):
        result = row["result"].replace("|", "/").replace("\n", " ")
        lines.append(f"| {row['part']} | {row['what']} | {result} | {SIGNS[row['good']]} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default=",".join(LIMITS), help="comma-separated (all)")
    parser.add_argument("--jobs", type=int, default=3, help="parts at a time (3)")
    parser.add_argument("--out", default="gpu_check.jsonl", help="file of the results")
    parser.add_argument("--wheels", help="folder of wheels to install first")
    parser.add_argument("--before", help="MODULE:FUNCTION to call in every process first")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # in its own process
    options = parser.parse_args(arguments)
    unknown = set(options.parts.split(",")) - set(LIMITS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(LIMITS)}")
    return options


def main() -> int:
    """Run the parts and print the table; return 1 if a result is bad."""
    options = parse()
    if options.part:
        from dev import gpu_parts

        for what, result, is_good in gpu_parts.run(options.part, options.before, options.wheels):
            write(options.out, options.part, what, result, is_good=is_good)
        return 0
    Path(options.out).unlink(missing_ok=True)
    names = options.parts.split(",")
    with ThreadPoolExecutor(options.jobs) as together:
        for name in [name for name in names if name == ALONE[0]]:
            run_part(name, options)
        others = [name for name in names if name not in ALONE]
        list(together.map(lambda name: run_part(name, options), others))
        for name in [name for name in names if name == ALONE[1]]:
            run_part(name, options)
    print(format_table(options.out))
    results = [json.loads(line) for line in Path(options.out).read_text().splitlines()]
    return int(any(result["good"] is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
