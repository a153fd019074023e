"""`lockstep bench startup`: how long until ranks have met, beside torchrun."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import sys
from pathlib import Path

import click

from lockstep.bench.startup import measure
from lockstep.errors import FileError, UsageError
from lockstep.record.environment import processor, usable_cores

__all__ = ["command"]


@click.command()
@click.option("-n", "--nprocs", multiple=True, type=int, default=(2, 4), show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Starts of each, in turn.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Also write the times here.")
def command(nprocs: tuple[int, ...], repeats: int, file: Path | None) -> None:
    """Start ranks that join a Gloo group and leave it, with each launcher in turn.

    "lockstep.launch, again" is a second launch from one program: a test, a
    notebook's cell. Medians of the wall-clock seconds of the whole command.
    """
    if repeats < 1 or min(nprocs) < 1:
        raise UsageError("bench startup: --repeats and -n are numbers from 1")
    context = {"machine": _machine(), "command": shlex.join(["lockstep", *sys.argv[1:]])}
    click.echo(f"# {context['machine']}\n# {context['command']}")
    records = []
    for count in nprocs:
        starts = list(measure(count, repeats))
        torchrun = next(start.median for start in starts if start.launcher == "torchrun")
        click.echo(f"{count} ranks, median of {repeats} starts")
        for start in starts:
            times = f"{start.median:6.2f} s   {start.median / torchrun:5.2f} of torchrun's"
            click.echo(f"    {start.launcher:<24}{times}")
        records += [{**start.record(), **context} for start in starts]
    if file is not None:
        _write(file, json.dumps(records, indent=1) + "\n")


def _machine() -> str:
    torch = importlib.metadata.version("torch")
    load = os.getloadavg()[0]
    return f"{processor()}, {usable_cores()} cores, torch {torch}, load {load:.1f} at the start"


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise FileError(f"{file} cannot be written: {error.strerror}") from error
