"""`lockstep doctor`: tests what is here, and says what would break a run."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import asdict

import click

from lockstep.errors import UsageError
from lockstep.show.finding import Finding

__all__ = ["command"]

COLOURS = {"good": "green", "note": "yellow", "bad": "red"}


@click.command()
@click.option("-n", "--nprocs", "ranks", default=2, show_default=True, help="Ranks wanted.")
@click.option("--threads", default=1, show_default=True, help="Threads of each rank.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(ranks: int, threads: int, as_json: bool) -> None:
    """Test what a run of N ranks needs here, in some ten seconds.

    Starts ranks and reduces a tensor on each backend, measures memory and
    loopback, compiles a program. Exit status 1 where something would break a run.
    Ends with a block to paste into an issue.
    """
    if ranks < 1 or threads < 1:
        raise UsageError(f"doctor for {ranks} ranks of {threads} threads: both are at least 1")
    from lockstep.show import doctor
    from lockstep.show.finding import Question

    quiet = as_json or not sys.stdout.isatty()
    findings: list[Finding] = []
    for one in doctor.examine(Question(ranks, threads), begin=lambda name: trying(name, quiet)):
        findings.append(one)
        if not as_json:
            trying("", quiet)
            say(one)
    trying("", quiet)
    ill = [one for one in findings if one.verdict == "bad"]
    if as_json:
        click.echo(json.dumps({"ok": not ill, "findings": [asdict(one) for one in findings]}))
    else:
        click.echo(f"\n{conclusion(len(ill))}\n\nTo report a problem, paste this:\n")
        click.echo(doctor.block(findings))
    if ill:
        raise SystemExit(1)


def say(one: Finding) -> None:
    """Print one finding, and beneath it what to do."""
    mark = click.style(f"{one.verdict:<4}", fg=COLOURS[one.verdict], bold=one.verdict == "bad")
    click.echo(f"{mark}  {one.subject:<15}  {one.what}")
    if one.advice:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
        indent = " " * min(23, width // 4)
        lines = textwrap.wrap(one.advice, max(width - len(indent) - 3, 20))
        click.echo(
            "\n".join(f"{indent}{'-> ' if n == 0 else '   '}{x}" for n, x in enumerate(lines))
        )


def trying(name: str, quiet: bool) -> None:
    """Show on the terminal what is being tried; the next line takes its place."""
    if not quiet:
        click.echo(f"\r\033[K{'...   ' + name if name else ''}", nl=False)


def conclusion(ill: int) -> str:
    """Return the last word."""
    if not ill:
        return "Nothing here would break a run."
    return (
        f"{'One thing' if ill == 1 else f'{ill} things'} here would break a run: see 'bad' above."
    )
