"""`lockstep doctor`: checks whether this machine has what a run needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from lockstep.kernel.errors import UsageError
from lockstep.tools.commands.options import json_option, printing_text
from lockstep.tools.report.checks import CheckResult, Requirements
from lockstep.version import VERSION

__all__ = ["command"]

COLORS = {"good": "green", "note": "yellow", "bad": "red"}


@click.command()
@click.option("-n", "--nprocs", "ranks", default=2, show_default=True, help="Number of ranks.")
@click.option("--threads", default=1, show_default=True, help="Threads per rank.")
@json_option
def command(
    ranks: int,
    threads: int,
    as_json: bool,
) -> None:
    """Check whether this machine has what a run needs. Takes about ten seconds.

    Starts ranks and reduces a tensor with each backend, and looks at versions, cores,
    memory and GPUs. The exit status is 1 if a run would fail. To report a problem,
    paste the output into an issue.
    """
    if ranks < 1 or threads < 1:
        raise UsageError(f"doctor: --nprocs ({ranks}) and --threads ({threads}) must be at least 1")
    with printing_text(as_json, lambda: to_json(results)):
        results = print_results(Requirements(ranks, threads))
    if has_failed(results):
        raise SystemExit(1)


def to_json(results: Sequence[CheckResult]) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return {"ok": not has_failed(results), "findings": [asdict(one) for one in results]}


def has_failed(results: Sequence[CheckResult]) -> bool:
    """Return whether a run would fail."""
    return any(one.verdict == "bad" for one in results)


def print_results(requirements: Requirements) -> list[CheckResult]:
    """Print the result of each check, settings and the conclusion, and return the results."""
    from lockstep.tools.report import doctor

    click.echo(f"lockstep {VERSION} doctor\n")
    results: list[CheckResult] = []
    for result in doctor.run_checks(requirements):
        results.append(result)
        print_result(result)
    for variable in doctor.list_variables():
        click.echo(f"      {doctor.hide_home(variable)}")
    num_failed = sum(one.verdict == "bad" for one in results)
    click.echo(f"\n{conclusion(num_failed)}")
    click.echo("To report a problem, paste this output into an issue.")
    return results


def print_result(one: CheckResult) -> None:
    """Print one result, with the advice below it."""
    from lockstep.tools.report.doctor import hide_home
    from lockstep.tools.report.terminal import terminal_width, wrap

    indent = " " * (23 if terminal_width() >= 60 else 6)
    lines = wrap(hide_home(one.what), indent, f"{one.verdict:<4}  {one.subject:<15}  ")
    advice = wrap(hide_home(one.advice), f"{indent}   ", f"{indent}-> ") if one.advice else []
    rest = "\n".join([*lines, *advice])[len(one.verdict) :]
    click.echo(click.style(one.verdict, fg=COLORS[one.verdict]) + rest)


def conclusion(num_failed: int) -> str:
    """Return the sentence about all checks."""
    if not num_failed:
        return "No check failed."
    checks = "One check" if num_failed == 1 else f"{num_failed} checks"
    return f"{checks} failed: see 'bad' above."
