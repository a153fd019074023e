"""`lockstep doctor`: checks whether this machine has what a run needs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import click

from lockstep.errors import UsageError
from lockstep.messages import JSON_HELP, say
from lockstep.report.checks import CheckResult, Requirements

__all__ = ["command"]

COLORS = {"good": "green", "note": "yellow", "bad": "red"}


@click.command()
@click.option("-n", "--nprocs", "ranks", default=2, show_default=True, help="Number of ranks.")
@click.option("--threads", default=1, show_default=True, help="Threads per rank.")
@click.option(
    "--hosts",
    metavar="HOST[:PORT],...",
    help="Check these hosts together instead, host 0 first. Run it on each with the same list. "
    "Default port: 29500.",
)
@click.option(
    "--node-rank",
    metavar="K",
    type=int,
    help="With --hosts: index of this host, from 0. Default: found by its name or address.",
)
@click.option(
    "--wait",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="With --hosts: how long to wait for the other hosts.",
)
@click.option(
    "--secret-file",
    metavar="FILE",
    help="With --hosts: file with the secret that the hosts share, as for lockstep run.",
)
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def command(
    ranks: int,
    threads: int,
    hosts: str | None,
    node_rank: int | None,
    wait: float,
    secret_file: str | None,
    as_json: bool,
) -> None:
    """Check whether this machine has what a run needs. Takes about ten seconds.

    Starts ranks and reduces a tensor with each backend, measures memory and the
    loopback interface, and compiles a program. The exit status is 1 if a run would
    fail. The output ends with a block to paste into an issue.

    With --hosts a,b it checks the hosts of a run together: names, ports, versions,
    processors and clocks. Run the same command on every host; each prints the results
    of all, and names the host to be changed.
    """
    if ranks < 1 or threads < 1:
        raise UsageError(f"doctor: --nprocs ({ranks}) and --threads ({threads}) must be at least 1")
    if hosts is None:
        checks = run_checks(Requirements(ranks, threads))
    else:
        checks = run_host_check(hosts, node_rank, secret_file, wait)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        results = print_results(checks)
    failed = any(one.verdict == "bad" for one in results)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "findings": [asdict(one) for one in results]}))
    if failed:
        raise SystemExit(1)


def run_checks(requirements: Requirements) -> Iterator[CheckResult]:
    """Yield the results of all checks of this machine."""
    from lockstep.report import doctor

    quiet = not sys.stdout.isatty()
    for result in doctor.run_checks(
        requirements, before_check=lambda name: show_progress(name, quiet)
    ):
        show_progress("", quiet)
        yield result
    show_progress("", quiet)


def run_host_check(
    text: str, node_rank: int | None, secret_file: str | None, wait: float
) -> Iterator[CheckResult]:
    """Yield the results of the check of several hosts."""
    from lockstep.launcher.run_secret import make_secret
    from lockstep.report import doctor, host_check

    hosts = host_check.parse_hosts(text)
    if node_rank is not None and not 0 <= node_rank < len(hosts):
        raise UsageError(f"--node-rank {node_rank}: --hosts has the hosts 0 to {len(hosts) - 1}")
    own = host_check.find_own_index(hosts) if node_rank is None else node_rank
    secret = make_secret(secret_file, own, os.environ)
    say(f"this is host {own}, {hosts[own]}; run the same command on every other host")
    yield from doctor.clean(host_check.check_hosts(hosts, own, secret, wait, say))


def print_results(checks: Iterable[CheckResult]) -> list[CheckResult]:
    """Print each result and the conclusion, and return the results."""
    from lockstep.report import doctor

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
    from lockstep.report.terminal import colorize, terminal_width, wrap

    indent = " " * (23 if terminal_width() >= 60 else 6)
    found = wrap(one.what, indent, f"{one.verdict:<4}  {one.subject:<15}  ")
    mark = colorize(found[0][:4], COLORS[one.verdict])
    advice = wrap(one.advice, f"{indent}   ", f"{indent}-> ") if one.advice else []
    print("\n".join([mark + found[0][4:], *found[1:], *advice]), flush=True)


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
