"""`lockstep runs`: lists the runs of a folder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.kernel.errors import LockstepError, UsageError

if TYPE_CHECKING:
    from lockstep.tools.report.summary import Summary

__all__ = ["command"]


@click.command()
@click.argument("folder", default="runs")
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON list of the runs on stdout instead."
)
def command(folder: str, as_json: bool) -> None:
    """List the runs in FOLDER, the oldest first.

    FOLDER is `runs` by default. The table shows the state, recipe, layout, last loss and
    metrics, the mean samples per second and the digest of the weights. The commands that resume
    runs which ended early follow below it, for runs with a checkpoint.
    """
    parent = Path(folder)
    if not parent.is_dir():
        raise UsageError(
            f"there is no folder {folder}; runs are stored in the folder `runs` where they were "
            f"started, or in the one that was given to --runs of `lockstep run` or `lockstep train`"
        )
    runs = list_runs(parent)
    if as_json:
        click.echo(json.dumps([run.to_json() for run in runs]))
    elif not runs:
        click.echo(f"{folder} has no runs yet.")
    else:
        from lockstep.tools.report.terminal import print_table

        print_table(*runs_table(runs), optional=("recipe", "layout", "digest"))
        commands = [run.summary.resume_command for run in runs if run.summary]
        if any(commands):
            click.echo("\n".join(["\nResume a run with", *filter(None, commands)]))


@dataclass(frozen=True)
class ListedRun:
    """A run in the list: its summary, or the reason why its record cannot be read."""

    name: str
    summary: Summary | None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        if self.summary is None:
            return {"name": self.name, "state": "unreadable", "message": self.error}
        one = self.summary
        return {
            "name": self.name,
            "state": one.state,
            "recipe": one.recipe,
            "layout": one.layout,
            "started": one.started,
            "loss": one.loss if math.isfinite(one.loss) else None,
            "metrics": {k: v for k, v in one.metrics.items() if math.isfinite(v)},
            "held_out": one.held_out,
            "samples_per_second": one.speed if math.isfinite(one.speed) else None,
            "digest": one.digest,
            "resume_command": one.resume_command or None,
        }


def list_runs(folder: Path) -> list[ListedRun]:
    """Return the runs in `folder`, the oldest first."""
    from lockstep.launcher.run_folder import RECORD_FILE, is_link_to_sibling
    from lockstep.record.reader import read_run
    from lockstep.tools.report.summary import summarize_run

    runs = []
    for run_folder in folder.iterdir():
        if (run_folder / RECORD_FILE).exists() and not is_link_to_sibling(run_folder):
            try:
                runs.append(ListedRun(run_folder.name, summarize_run(read_run(run_folder))))
            except LockstepError as error:
                runs.append(ListedRun(run_folder.name, None, str(error)))
    return sorted(runs, key=lambda run: (run.summary.started if run.summary else "", run.name))


def runs_table(runs: list[ListedRun]) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns and the rows of the table of runs."""
    metrics = list(
        dict.fromkeys(name for run in runs if run.summary for name in run.summary.metrics)
    )[:2]
    names = ["run", "state", "recipe", "layout", "loss", *metrics, "samples/s", "digest"]
    return names, [_table_row(run, metrics) for run in runs]


def _table_row(run: ListedRun, metrics: list[str]) -> list[str]:
    from lockstep.formatting import format_loss, format_metric_value, format_number
    from lockstep.tools.report.summary_text import STATE_NAMES

    if run.summary is None:
        return [run.name, "unreadable"] + [""] * (5 + len(metrics))
    summary = run.summary
    values = ((name, summary.metrics.get(name, math.nan)) for name in metrics)
    cells = [format_metric_value(*metric) if math.isfinite(metric[1]) else "" for metric in values]
    loss = format_loss(summary.loss) if math.isfinite(summary.loss) else ""
    speed = format_number(summary.speed) if math.isfinite(summary.speed) else ""
    layout = summary.layout.split(", ")[0]  # the report shows the rest
    figures = [loss, *cells, speed, summary.digest[:8]]
    return [run.name, STATE_NAMES[summary.state], summary.recipe, layout, *figures]
