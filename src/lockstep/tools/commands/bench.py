"""`lockstep bench`: one command per collective, `lockstep bench all_reduce` and others."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.files import write_output
from lockstep.formatting import format_size, parse_sizes
from lockstep.kernel.errors import UsageError, WorkError
from lockstep.launcher.signals import exiting_on_sigterm
from lockstep.messages import log
from lockstep.tools.bench.measured_collectives import COLLECTIVES, COPY, Collective

if TYPE_CHECKING:
    from lockstep.tools.bench.results import Contender, Result

__all__ = ["RANKS_HELP", "command", "parse_rank_counts"]

SIZES = "4,16,64,256,1K,4K,16K,64K,256K,1M,4M,16M,64M"
RANKS_HELP = "Numbers of ranks, measured one after another: 2 or 2,4."
PATH_OPTIONS = ("--json", "--plot")  # private, left out of recorded commands


def make(name: str) -> click.Command:
    """Return the command that measures the collective `name`."""
    collective = COLLECTIVES[name]

    def measure(**flags: Any) -> None:
        run(collective, flags)

    made = click.command(name, help=help_text(collective), short_help=collective.description)(
        measure
    )
    for option in options(collective):
        made = option(made)
    return made


def help_text(collective: Collective) -> str:
    """Return the help of the command."""
    return f"""Measure {collective.name}: {collective.description}.

    Each backend has its own ranks, and the backends take turns with one block of
    calls each. Inputs are rewritten before each call, all ranks start together, and
    the last result of each block is checked. The columns are those of nccl-tests,
    except that the time is the median over calls of the slowest rank's time.
    {COPY.name} copies as many bytes, on all ranks of the first backend at once.
    """


def options(collective: Collective) -> list[Any]:
    """Return the options of one collective."""
    chosen = [
        click.option("-n", "--nprocs", default="2", show_default=True, help=RANKS_HELP),
        click.option(
            "--backend",
            help="The reference backend.  [default: lockstep if it is built, else gloo]",
        ),
        click.option(
            "--vs",
            default="",
            metavar="NAMES",
            help="Backends to compare with: gloo,mpi.  [default: none]",
        ),
        click.option(
            "--seconds",
            default=0.4,
            show_default=True,
            metavar="SECONDS",
            help="Seconds of measurement per backend and size.",
        ),
        click.option(
            "--timeout",
            default=120.0,
            show_default=True,
            metavar="SECONDS",
            help="Longest wait for an answer of a rank, in seconds.",
        ),
        click.option("--bind", is_flag=True, help="Bind each rank to one core, round-robin."),
        click.option(
            "--json",
            "json_file",
            type=click.Path(path_type=Path),
            help="Write a list of the results to this file.",
        ),
        click.option(
            "--plot",
            type=click.Path(path_type=Path),
            help="Write a plot to this .svg file.",
        ),
    ]
    if collective.name != "barrier":
        chosen += [
            click.option(
                "--sizes",
                default=SIZES,
                metavar="SIZES",
                help="Sizes in bytes: 4,64K,1M.  [default: from 4 to 64M in steps of 4]",
            ),
        ]
    return chosen


def run(collective: Collective, flags: dict[str, Any]) -> None:
    """Measure with each number of ranks; print and write the results."""
    counts = parse_rank_counts(flags["nprocs"])
    sizes = parse_sizes(flags.get("sizes", "0"))  # a barrier has no size
    others = [name for name in flags["vs"].split(",") if name]
    validate(flags)
    from lockstep.tools.bench.results import record
    from lockstep.tools.bench.runners import find_mpiexec

    names = list(dict.fromkeys([flags["backend"] or default_backend(), *others]))
    if "mpi" in names:
        find_mpiexec()  # its error comes before the other backends start
    machine, command = describe_machine(), command_line()
    everything: list[Result] = []
    records: list[dict[str, Any]] = []
    click.echo(f"# {machine}\n# {command}")
    for ranks in counts:
        measured = measure_sizes(collective, ranks, sizes, names, flags)
        for results in measured:
            everything += results
            records += [record(one, results[0], machine, command) for one in results if one.times]
    if flags["json_file"]:
        write_output(flags["json_file"], json.dumps(records, indent=1) + "\n")
    if flags["plot"] and records:
        from lockstep.tools.bench.plot import draw

        write_output(flags["plot"], draw(everything, machine, command).svg())
    check_results(everything)


def check_results(everything: list[Result]) -> None:
    """Raise WorkError if a result is wrong, or if nothing could be measured."""
    wrong = sorted({result.contender.name for result in everything if result.wrong})
    if wrong:
        raise WorkError(f"wrong results of {', '.join(wrong)}: see the column 'wrong'")
    if not any(result.times for result in everything):
        raise WorkError(f"nothing could be measured: {everything[0].error}")


def measure_sizes(
    collective: Collective,
    ranks: int,
    sizes: list[int],
    names: list[str],
    flags: dict[str, Any],
) -> Iterator[list[Result]]:
    """Start the backends on `ranks` ranks; print and yield the results of each size."""
    from lockstep.tools.bench import results as tables
    from lockstep.tools.bench.interleaved import measure
    from lockstep.tools.bench.workload import ITEM_BYTES, Workload

    check_memory(max(sizes), ranks, len(names))
    with start_contenders(collective, ranks, names, flags) as contenders:
        click.echo(f"\n# {collective.name} on {ranks} ranks")
        click.echo(tables.header())
        done: set[int] = set()
        results: list[Result] = []
        for size in sizes:
            count = collective.elements(size, ITEM_BYTES, ranks)
            if count in done:
                continue
            done.add(count)
            workload = Workload(collective.name, count)
            actual = collective.bytes(count, ITEM_BYTES, ranks)
            status(f"{collective.name}, {ranks} ranks, {format_size(actual)} ...")
            results = measure(contenders, workload, ranks, actual, flags["seconds"])
            status("")
            click.echo("\n".join(tables.rows(results)))
            yield results
        click.echo(tables.caption(results[0], contenders[0].name))


@contextmanager
def start_contenders(
    collective: Collective, ranks: int, names: list[str], flags: dict[str, Any]
) -> Iterator[list[Contender]]:
    """Start the ranks of each backend, and stop all of them in the end."""
    from lockstep.tools.bench.results import Contender
    from lockstep.tools.bench.runners import MpiRunner, Rendezvous, TorchRunner

    with ExitStack() as opened:
        rendezvous = opened.enter_context(closing(Rendezvous(ranks, flags["timeout"])))
        contenders = []
        for name in names:
            status(f"starting {ranks} ranks of {name} ...")
            runner = MpiRunner(rendezvous) if name == "mpi" else TorchRunner(name, rendezvous)
            opened.callback(runner.end)
            if flags["bind"]:
                runner.ask({"bind": True})
            contenders.append(Contender(name, runner))
            if name == "lockstep" and collective.name != "barrier":
                contenders.append(Contender("lockstep (segment)", runner, shared_memory=True))
        if collective.name != "barrier":
            contenders.append(Contender(COPY.name, contenders[0].runner, is_copy=True))
        status("")
        yield contenders


def default_backend() -> str:
    """Return the default backend for CPU tensors, with a note if `lockstep` is unavailable."""
    from lockstep.comm.backend import reason_unavailable
    from lockstep.launcher.world import cpu_backend

    name = cpu_backend()
    reason = reason_unavailable()
    if name != "lockstep" and reason is not None:
        log(f"the reference is {name}, because the backend 'lockstep' is not available: {reason}")
    return name


def validate(flags: dict[str, Any]) -> None:
    """Raise UsageError for options that contradict each other."""
    if flags["seconds"] <= 0 or flags["timeout"] <= 0:
        raise UsageError("--seconds and --timeout must be positive")
    if flags["bind"] and not hasattr(os, "sched_setaffinity"):
        raise UsageError("--bind: this system cannot bind a process to a core")
    if flags["plot"]:
        from lockstep.tools.bench.plot import check_format

        check_format(flags["plot"])
    for file in (flags["json_file"], flags["plot"]):
        if file and not file.absolute().parent.is_dir():
            raise UsageError(f"{file} cannot be written: no such folder: {file.parent}")


def check_memory(size: int, ranks: int, backends: int) -> None:
    """Raise UsageError if the buffers of all ranks do not fit into memory."""
    import psutil

    needed, free = size * 3 * ranks * (backends + 1), psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"{format_size(size)} on {ranks} ranks of {backends} backends needs about "
            f"{format_size(needed)} of memory, but only {format_size(free)} are available: choose "
            "smaller --sizes"
        )


def parse_rank_counts(text: str) -> list[int]:
    """Return the rank counts of "2,4"."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise UsageError(f"-n {text}: expected a number of ranks of at least 1, or several: 2,4")
    return counts


def describe_machine() -> str:
    """Return the machine in one line."""
    from lockstep.record.run_environment import count_usable_cores, processor_name

    count, load = count_usable_cores(), os.getloadavg()[0]
    return (
        f"{processor_name()}, {count} core{'s' if count > 1 else ''}, load {load:.1f} at the start"
    )


def command_line() -> str:
    """Return the command as it was typed, without paths of files."""
    kept: list[str] = []
    given = iter(sys.argv[1:])
    for word in given:
        if word in PATH_OPTIONS:
            next(given, None)
        elif not word.startswith(tuple(f"{option}=" for option in PATH_OPTIONS)):
            kept.append(word)
    return shlex.join(["lockstep", *kept])


def status(text: str) -> None:
    """Show the current activity on a terminal, on a line that the next status replaces."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


@click.group()
@click.pass_context
def command(ctx: click.Context) -> None:
    """Compare the backends of this machine with each other in one run."""
    ctx.with_resource(exiting_on_sigterm())


for collective_name in COLLECTIVES:
    command.add_command(make(collective_name))
