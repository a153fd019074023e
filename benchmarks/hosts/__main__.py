"""`python -m benchmarks.hosts`: two simulated hosts of two ranks, compared with Gloo."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks.hosts.simulation import measure
from benchmarks.hosts.table import call_lines, train_lines
from lockstep.cli import run
from lockstep.files import write_output
from lockstep.kernel.errors import UsageError, WorkError
from lockstep.tools.commands.bench import describe_command, describe_machine

__all__ = ["command"]

TESTS = Path(__file__).resolve().parents[2] / "tests"
POSITIVE = click.IntRange(min=1)


@click.command()
@click.option("--sizes", default="1,4,16,64", show_default=True, help="MiB of a tensor.")
@click.option(
    "--mbit", default="1000", show_default=True,
    help="Rates of the links in Mbit/s, by commas; 0 for no limit.",
)  # fmt: skip
@click.option(
    "--placements", default="contiguous,alternating", show_default=True,
    help="Ranks 0, 1 | 2, 3 or 0, 2 | 1, 3.",
)  # fmt: skip
@click.option("--repeats", default=11, show_default=True, type=POSITIVE, help="Calls per size.")
@click.option("--train", is_flag=True, help="Time training steps in place of calls.")
@click.option("--width", default=1024, show_default=True, type=POSITIVE, help="Width of the model.")
@click.option("--steps", default=12, show_default=True, type=POSITIVE, help="Steps per launch.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write results.")
def command(**flags: Any) -> None:
    """Measure all_reduce and the trainer's reproducible all-reduce between two simulated hosts.

    The hosts are network namespaces, joined by links whose rate is limited (tc tbf). The
    contenders take turns on the same inputs, written anew for each call; each answer is
    checked. The time of a call is that of the slowest rank. The bytes are those that the
    network interface of a host has sent.
    """
    sys.path.insert(0, str(TESTS))
    network = importlib.import_module("hosts").network
    try:
        sizes = [int(each) << 20 for each in flags["sizes"].split(",")]
        rates = [float(each) or None for each in flags["mbit"].split(",")]
    except ValueError:
        raise UsageError("--sizes and --mbit are numbers, by commas") from None
    machine = describe_machine()
    typed = describe_command()
    click.echo(f"# {machine}\n# {typed}")
    found = []
    for rate in rates:
        for placement in flags["placements"].split(","):
            where = f"{placement}, {rate:g} Mbit/s" if rate else f"{placement}, no limit"
            measure_one = measure_training if flags["train"] else measure_calls
            rows = measure_one(placement, rate, sizes, flags, network)
            found += [
                row | {"placement": placement, "mbit": rate, "machine": machine, "command": typed}
                for row in rows
            ]
            lines = train_lines if flags["train"] else call_lines
            click.echo("\n".join(["", f"# {where}", *lines(rows)]))
    if flags["file"]:
        write_output(flags["file"], json.dumps(found, indent=1) + "\n")


def measure_calls(
    placement: str, rate: float | None, sizes: list[int], flags: dict[str, Any], network: Any
) -> list[dict[str, Any]]:
    """Return a row per size and contender."""
    options = {"sizes": sizes, "repeats": flags["repeats"]}
    rows: list[dict[str, Any]] = measure("calls", placement, rate, options, network)
    return rows


def measure_training(
    placement: str, rate: float | None, _sizes: list[int], flags: dict[str, Any], network: Any
) -> list[dict[str, Any]]:
    """Return a row per backend, of two launches each, by turns."""
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(2):
        for backend in ("gloo", "lockstep"):
            options = {"backend": backend, "width": flags["width"], "steps": flags["steps"]}
            row = measure("train", placement, rate, options, network) | {"contender": backend}
            known = rows.setdefault(backend, row)
            if known is not row:
                known["times"] += row["times"]
                known["sent"] += row["sent"]
            if row["digest"] != rows["gloo"]["digest"]:
                raise WorkError(f"{backend}, {placement}: the digest differs from that of gloo")
    return list(rows.values())


if __name__ == "__main__":
    run(command)
