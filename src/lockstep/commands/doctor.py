"""`lockstep doctor`: tests what is here, and says what would break a run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from lockstep.errors import UsageError
from lockstep.report.check_result import Finding

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
    from lockstep.report import doctor
    from lockstep.report.check_result import Question

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
    from lockstep.report.terminal import folded, painted, width

    indent = " " * (23 if width() >= 60 else 6)
    found = folded(one.what, indent, f"{one.verdict:<4}  {one.subject:<15}  ")
    mark = painted(found[0][:4], COLOURS[one.verdict])
    advice = folded(one.advice, f"{indent}   ", f"{indent}-> ") if one.advice else []
    print("\n".join([mark + found[0][4:], *found[1:], *advice]), flush=True)


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
