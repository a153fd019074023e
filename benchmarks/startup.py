"""The time to start ranks and join a group, next to torchrun: `python -m benchmarks.startup`.

All launchers run the same script in turn, so that other load on the machine affects all of
them. Times are wall-clock seconds of the whole command.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from lockstep.files import write_output
from lockstep.kernel.errors import UsageError
from lockstep.launcher.launch import launch
from lockstep.processor_core import count_usable_cores, processor_name
from lockstep.tools.commands.bench import RANKS_HELP
from lockstep.tools.commands.options import parse_rank_counts

__all__ = ["command"]

SCRIPT = """\
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""

TIMEOUT = 120.0  # seconds per start


@click.command()
@click.option("-n", "--nprocs", default="2,4", show_default=True, help=RANKS_HELP)
@click.option("--repeats", default=5, show_default=True, help="Measured starts per launcher.")
@click.option(
    "--json",
    "file",
    type=click.Path(path_type=Path),
    help="Write a list of the times to this file.",
)
def command(nprocs: str, repeats: int, file: Path | None) -> None:
    """Start ranks that join and leave a Gloo group, with each launcher in turn.

    Prints the median wall-clock seconds of the whole command. "lockstep.launch, again"
    is a second launch from one program, as in a test or a notebook.
    """
    counts = parse_rank_counts("-n", nprocs)
    if repeats < 1:
        raise UsageError("--repeats must be at least 1")
    context = {
        "machine": _machine(),
        "command": shlex.join(["python", "-m", "benchmarks.startup", *sys.argv[1:]]),
    }
    click.echo(f"# {context['machine']}\n# {context['command']}")
    records = []
    for count in counts:
        starts = list(measure(count, repeats))
        torchrun = next(start.median for start in starts if start.launcher == "torchrun")
        click.echo(f"{count} ranks, median of {repeats} starts")
        for start in starts:
            times = f"{start.median:6.2f} s   {start.median / torchrun:5.2f} of torchrun"
            click.echo(f"    {start.launcher:<24}{times}")
        records += [{**start.record(), **context} for start in starts]
    if file is not None:
        write_output(file, json.dumps(records, indent=1) + "\n")


def _machine() -> str:
    torch = importlib.metadata.version("torch")
    load = os.getloadavg()[0]
    machine = f"{processor_name()}, {count_usable_cores()} cores"
    return f"{machine}, torch {torch}, load {load:.1f} at the start"


@dataclass(frozen=True)
class StartTimes:
    """The startup times of one launcher with `nprocs` ranks, in seconds."""

    launcher: str
    nprocs: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median time."""
        return statistics.median(self.seconds)

    def record(self) -> dict[str, Any]:
        """Return an object for the JSON file."""
        return {"benchmark": "startup", **asdict(self), "median_seconds": self.median}


def measure(nprocs: int, repeats: int) -> Iterator[StartTimes]:
    """Time each launcher `repeats` times in turn, after a warm-up round.

    Raises:
        RuntimeError: A launcher failed; the message ends with the last line of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "join.py")
        script.write_text(SCRIPT)
        starts = _starts(nprocs, script)
        times: dict[str, list[float]] = {name: [] for name in starts}
        for counted in [False] + [True] * repeats:
            for name, start in starts.items():
                began = time.perf_counter()
                start()
                if counted:
                    times[name].append(time.perf_counter() - began)
    for name, seconds in times.items():
        yield StartTimes(name, nprocs, tuple(seconds))


def _starts(nprocs: int, script: Path) -> dict[str, Callable[[], object]]:
    lockstep = [sys.executable, "-m", "lockstep", "run"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    count = ["--nproc-per-node", str(nprocs)]
    return {
        "lockstep run": lambda: _run([*lockstep, *count, str(script)], script.parent),
        "torchrun": lambda: _run([*torchrun, *count, str(script)], script.parent),
        "lockstep.launch, again": lambda: launch(_join, nprocs=nprocs, timeout=TIMEOUT),
    }


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT
    )
    if done.returncode != 0:
        last = done.stdout.decode(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}: {last}")


def _join() -> None:
    exec(SCRIPT, {})


if __name__ == "__main__":
    command()
