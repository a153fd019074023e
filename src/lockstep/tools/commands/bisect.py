"""`lockstep bisect`: finds the first difference between two runs."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from lockstep.kernel.errors import UsageError
from lockstep.messages import escape_control, log
from lockstep.tools.commands.options import json_option, printing_text, resolve_run, runs_option

if TYPE_CHECKING:
    from lockstep.tools.replay.bisection import Bisection

__all__ = ["command"]


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="A B")
@runs_option
@json_option
def command(
    runs: tuple[str, ...],
    folder: str,
    as_json: bool,
) -> None:
    """Find the first bit in which the runs A and B (names or folders) differ.

    The records tell the first step. Both runs are then replayed around it on one
    process, each with its own sources, from their nearest checkpoints: module by module,
    then operator by operator. The result names the step, the micro-batch, the module,
    the direction (data, state, forward, backward, reduction or optimizer), the operator
    with its line, and the first element that differs.

    Replays run the whole program, so files that it writes itself are written again.

    Exit status: 0 no difference, 1 a difference was found, 2 usage error.
    """
    places = [resolve_run(run, folder) for run in runs]
    if len(places) != 2:
        raise UsageError(f"bisect compares two runs, and got {len(places)}: lockstep bisect A B")
    from lockstep.tools.replay.bisection import bisect_runs
    from lockstep.tools.replay.bisection_report import bisection_json
    from lockstep.tools.replay.recorded_run import read_recorded_run

    a, b = map(read_recorded_run, places, runs)
    bisection = bisect_runs(a, b, log)
    with printing_text(as_json, partial(bisection_json, bisection)):
        print_bisection(bisection)
    sys.exit(0 if bisection.equal else 1)


def print_bisection(bisection: Bisection) -> None:
    """Print the result on the terminal."""
    from lockstep.tools.replay.bisection_report import (
        describe_divergence,
        list_facts,
        list_sentences,
        suggest_commands,
    )
    from lockstep.tools.report.terminal import print_sentences, print_table

    print_sentences(describe_divergence(bisection))
    if rows := list_facts(bisection):
        click.echo()
        print_table(["", bisection.a.name, bisection.b.name], rows)
    click.echo()
    print_sentences(*list_sentences(bisection))
    if lines := suggest_commands(bisection):
        click.echo("\nTo look further:")
        for line in lines:
            click.echo(escape_control(f"  {line}"))
