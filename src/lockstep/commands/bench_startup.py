"""`lockstep bench startup`: how long until ranks have met, beside torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import click

from lockstep.bench.startup import measure
from lockstep.errors import UsageError

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
    records = []
    for count in nprocs:
        starts = list(measure(count, repeats))
        torchrun = next(start.median for start in starts if start.launcher == "torchrun")
        click.echo(f"{count} ranks, median of {repeats} starts")
        for start in starts:
            times = f"{start.median:6.2f} s   {start.median / torchrun:5.2f} of torchrun's"
            click.echo(f"    {start.launcher:<24}{times}")
        records += [start.record() for start in starts]
    if file is not None:
        file.write_text(json.dumps(records, indent=1) + "\n")
