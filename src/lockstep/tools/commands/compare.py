"""`lockstep compare`: compares the speed, results and settings of runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from lockstep.kernel.errors import UsageError
from lockstep.messages import escape_control
from lockstep.tools.commands.options import json_option, printing_text, resolve_run, runs_option

if TYPE_CHECKING:
    from lockstep.tools.report.run_comparison import RunComparison

__all__ = ["command"]


@click.command()
@click.argument("runs", nargs=-1, required=True)
@runs_option
@json_option
def command(
    runs: tuple[str, ...],
    folder: str,
    as_json: bool,
) -> None:
    """Compare two or more RUNS (names or folders) with the first one.

    Shows the ratio of the speeds; whether the final weights are bit-identical, and if
    not, the first step at which the losses differ; and the differences in command,
    layout, options, learning rate, model and environment.
    """
    if len(runs) < 2:
        raise UsageError(f"compare needs two or more runs, but only {runs[0]} was given")
    from lockstep.record.reader import read_run
    from lockstep.tools.report.run_comparison import compare_runs, comparison_json

    result = compare_runs([read_run(resolve_run(run, folder)) for run in runs])
    with printing_text(as_json, partial(comparison_json, result)):
        print_text(result)


def print_text(result: RunComparison) -> None:
    """Print the comparison on the terminal."""
    from lockstep.tools.report.run_comparison import comparison_table
    from lockstep.tools.report.terminal import print_sentences, print_table

    for pair in result.pairs:
        print_sentences(*pair.sentences)
        click.echo()
    for run in result.runs:
        for remark in run.remarks:
            click.echo(escape_control(f"{run.name}: {remark}"), err=True)
    print_table(*comparison_table(result), optional=("state", "layout", "digest of weights"))
    if result.settings:
        click.echo("\nDifferences in settings:")
        print_table(["", *result.names], [[name, *row] for name, row in result.settings.items()])
