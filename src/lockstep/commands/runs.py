"""`lockstep runs`: the runs of a folder in a table."""

from __future__ import annotations

import json
from pathlib import Path

import click

from lockstep.errors import UsageError

__all__ = ["command"]


@click.command()
@click.argument("folder", default="runs")
@click.option("--json", "as_json", is_flag=True, help="Print a list of JSON objects.")
def command(folder: str, as_json: bool) -> None:
    """List the runs of FOLDER (runs by default): state, recipe, layout, how well, how fast."""
    place = Path(folder)
    if not place.is_dir():
        raise UsageError(
            f"there is no folder {folder}; runs are kept in the folder `runs` of the place "
            f"where they were started, or where --runs said"
        )
    from lockstep.report import listing

    found = listing.of(place)
    if as_json:
        click.echo(json.dumps([one.plain() for one in found]))
    elif not found:
        click.echo(f"{folder} holds no runs yet.")
    else:
        from lockstep.report.terminal import print_table

        print_table(*listing.table(found), spare=("recipe", "layout", "digest"))
