"""`lockstep doctor`: checks whether this machine has what a run needs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain

import click

from lockstep.kernel.errors import UsageError
from lockstep.messages import JSON_HELP
from lockstep.tools.report.checks import CheckResult, Requirements

__all__ = ["command"]

COLORS = {"good": "green", "note": "yellow", "bad": "red"}


@click.command()
@click.option("-n", "--nprocs", "ranks", default=2, show_default=True, help="Number of ranks.")
@click.option("--threads", default=1, show_default=True, help="Threads per rank.")
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def command(
    ranks: int,
    threads: int,
    as_json: bool,
) -> None:
    """Check whether this machine has what a run needs. Takes about ten seconds.

    Starts ranks and reduces a tensor with each backend, and looks at cores, memory,
    disk, network and compiler. The exit status is 1 if a run would fail. The output
    ends with a block to paste into an issue.

    Started on every host by `lockstep run -n 1 --nnodes 2 ... --no-python lockstep
    doctor`, it also compares the hosts: versions, processors, backends and clocks.
    """
    if ranks < 1 or threads < 1:
        raise UsageError(f"doctor: --nprocs ({ranks}) and --threads ({threads}) must be at least 1")
    checks = run_checks(Requirements(ranks, threads))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        checks = chain(checks, compare_hosts())
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        results = print_results(checks)
    failed = any(one.verdict == "bad" for one in results)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "findings": [asdict(one) for one in results]}))
    if failed:
        raise SystemExit(1)


def run_checks(requirements: Requirements) -> Iterator[CheckResult]:
    """Yield the results of all checks of this machine."""
    from lockstep.tools.report import doctor

    quiet = not sys.stdout.isatty()
    for result in doctor.run_checks(
        requirements, before_check=lambda name: show_progress(name, quiet)
    ):
        show_progress("", quiet)
        yield result
    show_progress("", quiet)


def compare_hosts() -> Iterator[CheckResult]:
    """Yield what differs between the hosts of this launch, on rank 0."""
    from lockstep.tools.report import doctor
    from lockstep.tools.report.checks import hosts

    facts = hosts.gather_facts()
    if os.environ.get("RANK") == "0":
        yield from doctor.clean(hosts.compare_hosts(facts))


def print_results(checks: Iterable[CheckResult]) -> list[CheckResult]:
    """Print each result and the conclusion, and return the results."""
    from lockstep.tools.report import doctor

    results: list[CheckResult] = []
    for result in checks:
        results.append(result)
        print_result(result)
    num_failed = sum(one.verdict == "bad" for one in results)
    click.echo(f"\n{conclusion(num_failed)}\n\nTo report a problem, paste this:\n")
    click.echo(doctor.issue_block(results))
    return results


def print_result(one: CheckResult) -> None:
    """Print one result, with the advice below it."""
    from lockstep.tools.report.terminal import print_styled, terminal_width, wrap

    indent = " " * (23 if terminal_width() >= 60 else 6)
    lines = wrap(one.what, indent, f"{one.verdict:<4}  {one.subject:<15}  ")
    advice = wrap(one.advice, f"{indent}   ", f"{indent}-> ") if one.advice else []
    print_styled(one.verdict, COLORS[one.verdict], "\n".join([*lines, *advice])[len(one.verdict) :])


def show_progress(name: str, quiet: bool) -> None:
    """Show the name of the running check on the terminal; the next line replaces it."""
    if not quiet:
        click.echo(f"\r\033[K{'...   ' + name if name else ''}", nl=False)


def conclusion(num_failed: int) -> str:
    """Return the sentence about all checks."""
    if not num_failed:
        return "No check failed."
    checks = "One check" if num_failed == 1 else f"{num_failed} checks"
    return f"{checks} failed: see 'bad' above."
