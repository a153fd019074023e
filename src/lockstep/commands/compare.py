"""`lockstep compare`: which run is faster, whether they agree, and what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.commands.report import kind_of, place_of, save, show_page
from lockstep.errors import UsageError
from lockstep.messages import escape_control

if TYPE_CHECKING:
    from lockstep.report.comparison import Comparison

__all__ = ["command"]


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("--runs", "folder", default="runs", show_default=True, help="The folder of runs.")
@click.option("--format", "kind", type=click.Choice(["text", "html", "md"]), help="What to make.")
@click.option("-o", "--output", help="Where to write it; '-' is the standard output.")
@click.option("--open", "opened", is_flag=True, help="Make the page and open it in the browser.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    runs: tuple[str, ...],
    folder: str,
    kind: str | None,
    output: str | None,
    opened: bool,
    as_json: bool,
) -> None:
    """Compare RUNS with the first of them, by name or folder.

    Says which is faster and by how much, or that the steps' spread does not allow
    to tell; whether they end in the same weights, and if not at which step their
    losses part and which tensor differs first; and what differs in command,
    layout, options and environment.
    """
    if len(runs) < 2:
        raise UsageError(f"compare needs two runs or more, and was given only {runs[0]}")
    from lockstep.record.reader import read
    from lockstep.report import comparison as show

    found = show.compare([read(place_of(run, folder)) for run in runs])
    if as_json:
        click.echo(json.dumps(show.plain(found)))
        return
    kind = kind or ("html" if opened or (output and kind_of(output) == "html") else "text")
    if kind == "text" and output is None:
        print_text(found)
        return
    content = show.html(found) if kind == "html" else show.markdown(found)
    suffix = "html" if kind == "html" else "md"
    place = save(content.encode(), output, Path(f"compare.{suffix}"))
    if opened and place is not None:
        show_page(place)


def print_text(found: Comparison) -> None:
    """Print the comparison on the terminal."""
    from lockstep.report import comparison as show
    from lockstep.report.terminal import folded, print_table

    for one in found.against:
        for sentence in one.sentences:
            click.echo("\n".join(folded(sentence)))
        click.echo()
    for run in found.runs:
        for remark in run.remarks:
            click.echo(escape_control(f"{run.name}: {remark}"), err=True)
    print_table(*show.table(found), spare=("state", "layout", "digest"))
    if found.settings:
        click.echo("\nWhat differs:")
        print_table(["", *found.names], [[name, *row] for name, row in found.settings.items()])
