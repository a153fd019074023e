"""`lockstep bench all_reduce` and its like: one command made for each collective."""

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

from lockstep.bench import sizes as written
from lockstep.bench.collectives import COLLECTIVES, Collective
from lockstep.errors import FileError, UsageError, WorkError

if TYPE_CHECKING:
    from lockstep.bench.peers import Meeting
    from lockstep.bench.rounds import Contender, Result

__all__ = ["make"]

DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
COPY = "memcpy"
PLACES = ("--json", "--plot", "--mpi-python")  # of this machine: nobody else's business


def make(name: str) -> click.Command:
    """Return the command that measures the collective `name`."""
    collective = COLLECTIVES[name]

    def measure(**flags: Any) -> None:
        run(collective, flags)

    command = click.command(name, help=explained(collective))(measure)
    for option in reversed(options(collective)):
        command = option(command)
    return command


def explained(collective: Collective) -> str:
    """Return the command's help."""
    return f"""Measure {collective.name}: {collective.sentence}.

    Each backend has ranks of its own; they take turns, a block of calls each. The
    input is written anew before each call, all ranks begin together, and the last
    answer of each block is checked. Columns as nccl-tests prints them, but the
    time is the slowest rank's, its median over the calls. {COPY} is one thread
    that copies as many bytes.
    """


def options(collective: Collective) -> list[Any]:
    """Return the options of one collective."""
    chosen = [
        click.option("-n", "--nprocs", default="2", show_default=True, help="Ranks: 2 or 2,4."),
        click.option("--backend", help="The first line.  [default: lockstep where it is built]"),
        click.option("--vs", default="", metavar="NAMES", help="Peers beside it: gloo,mpi."),
        click.option(
            "--seconds", default=0.4, show_default=True, help="For each backend and size."
        ),
        click.option("--timeout", default=120.0, show_default=True, help="Longest wait, seconds."),
        click.option("--bind", is_flag=True, help="Keep each rank on one core, in turn."),
        click.option("--mpi-python", metavar="PATH", help="A Python with mpi4py, for --vs mpi."),
        click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write results."),
        click.option("--plot", type=click.Path(path_type=Path), help="Draw a .svg or a .png."),
    ]
    if collective.name != "barrier":
        chosen += [
            click.option("-b", "--begin", default="4", show_default=True, help="Smallest size."),
            click.option("-e", "--end", default="64M", show_default=True, help="Largest size."),
            click.option(
                "-f", "--factor", default=4.0, show_default=True, help="From size to size."
            ),
            click.option("--sizes", help="Sizes by name, in their place: 4,64K,1M."),
            click.option(
                "--dtype", type=click.Choice(DTYPES), default="float32", show_default=True
            ),
        ]
    if collective.reduces:
        ops = click.Choice(REDUCTIONS, case_sensitive=False)
        chosen.append(click.option("--op", type=ops, default="SUM", show_default=True))
    if collective.can_alias:
        help_text = "The smaller buffer is a part of the larger."
        chosen.append(click.option("--in-place", is_flag=True, help=help_text))
    return chosen


def run(collective: Collective, flags: dict[str, Any]) -> None:
    """Measure for each number of ranks; print, write, draw."""
    counts = numbers(flags["nprocs"])
    wanted = wanted_sizes(flags)
    peers = [name for name in flags["vs"].split(",") if name]
    check(collective, flags)
    from lockstep.bench.peers import mpi_python
    from lockstep.bench.table import record

    python = mpi_python(flags["mpi_python"]) if "mpi" in [*peers, flags["backend"]] else ""
    names = list(dict.fromkeys([flags["backend"] or own_backend(), *peers]))
    machine, command = described(), spoken_command()
    everything: list[Result] = []
    records: list[dict[str, Any]] = []
    click.echo(f"# {machine}\n# {command}")
    for ranks in counts:
        found = race(collective, ranks, wanted, names, python, flags)
        for results in found:
            everything += results
            records += [record(one, results[0], machine, command) for one in results if one.times]
    if flags["json_file"]:
        save_text(flags["json_file"], json.dumps(records, indent=1) + "\n")
    if flags["plot"] and records:
        from lockstep.bench.plot import draw, save

        save(draw(everything, machine, command), flags["plot"])
    judge(everything)


def judge(everything: list[Result]) -> None:
    """Raise WorkError where answers were wrong, or where nobody could do anything."""
    wrong = sorted({result.contender.name for result in everything if result.wrong})
    if wrong:
        raise WorkError(f"wrong answers from {', '.join(wrong)}: see the column 'wrong'")
    if not any(result.times for result in everything):
        raise WorkError(f"nothing could be measured: {everything[0].cannot}")


def race(
    collective: Collective,
    ranks: int,
    wanted: list[int],
    names: list[str],
    python: str,
    flags: dict[str, Any],
) -> Iterator[list[Result]]:
    """Start the peers on `ranks` ranks, and yield each size's results when they are printed."""
    from lockstep.bench import table
    from lockstep.bench.measure import Order
    from lockstep.bench.pattern import itemsize
    from lockstep.bench.rounds import measure

    dtype, op = flags.get("dtype", "uint8"), flags.get("op", "SUM").upper()
    in_place = bool(flags.get("in_place"))
    width = itemsize(dtype)
    check_memory(max(wanted), ranks, len(names))
    with contenders(collective, ranks, names, python, flags) as racing:
        click.echo(f"\n# {collective.name} on {ranks} ranks" + (", in place" if in_place else ""))
        click.echo(table.header())
        done: set[int] = set()
        results: list[Result] = []
        for size in wanted:
            count = collective.elements(size, width, ranks)
            if count in done:
                continue
            done.add(count)
            order = Order(collective.name, count, dtype, op, in_place)
            actual = collective.bytes(count, width, ranks)
            status(f"{collective.name}, {ranks} ranks, {written.spoken(actual)} ...")
            results = measure(racing, order, ranks, actual, flags["seconds"])
            status("")
            click.echo("\n".join(table.rows(results)))
            yield results
        click.echo(table.caption(results[0], racing[0].name))


@contextmanager
def contenders(
    collective: Collective, ranks: int, names: list[str], python: str, flags: dict[str, Any]
) -> Iterator[list[Contender]]:
    """Start a peer for each name, and end them all."""
    from lockstep.bench.peers import CopyPeer, Meeting
    from lockstep.bench.rounds import Contender

    with ExitStack() as opened:
        meeting = opened.enter_context(closing(Meeting(ranks, flags["timeout"])))
        racing = []
        for name in names:
            status(f"starting {ranks} ranks of {name} ...")
            peer = start(name, python, meeting)
            opened.callback(peer.end)
            if flags["bind"]:
                peer.ask({"bind": True})
            racing.append(Contender(name, peer))
            if name == "lockstep" and collective.name != "barrier":
                racing.append(Contender("lockstep (segment)", peer, segment=True))
        if collective.name != "barrier":
            racing.append(Contender(COPY, CopyPeer()))
        status("")
        yield racing


def start(name: str, python: str, meeting: Meeting) -> Any:
    """Start the ranks of one peer."""
    from lockstep.bench.peers import MpiPeer, TorchPeer

    return MpiPeer(python, meeting) if name == "mpi" else TorchPeer(name, meeting)


def own_backend() -> str:
    """Return what this build uses for CPU tensors; say where it is not its own."""
    from lockstep.launcher.world import cpu_backend

    name = cpu_backend()
    if name != "lockstep":
        click.echo(f"The backend 'lockstep' is not built here: {name} comes first.", err=True)
    return name


def check(collective: Collective, flags: dict[str, Any]) -> None:
    """Raise UsageError for flags that contradict each other."""
    op, dtype = flags.get("op", "SUM").upper(), flags.get("dtype", "uint8")
    if op.startswith("B") and "float" in dtype:
        raise UsageError(f"--op {op} works on bits, not on {dtype}: take --dtype int32")
    if op == "AVG" and "float" not in dtype:
        raise UsageError(f"--op AVG of {dtype} is no {dtype}: take --dtype float32")
    if flags["seconds"] <= 0 or flags["timeout"] <= 0:
        raise UsageError("--seconds and --timeout are positive numbers of seconds")
    if flags["bind"] and not hasattr(os, "sched_setaffinity"):
        raise UsageError("--bind: this system does not let a program choose its core")
    if flags["plot"]:
        from lockstep.bench.plot import check_format

        check_format(flags["plot"])
    for file in (flags["json_file"], flags["plot"]):
        if file and not file.absolute().parent.is_dir():
            raise UsageError(f"{file} cannot be written: there is no folder {file.parent}")


def check_memory(size: int, ranks: int, peers: int) -> None:
    """Raise UsageError where the buffers of all ranks would not fit into memory."""
    import psutil

    needed, free = size * 3 * ranks * (peers + 1), psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"{written.spoken(size)} on {ranks} ranks of {peers} backends needs about "
            f"{written.spoken(needed)} of memory, {written.spoken(free)} are free: end at a "
            "smaller size with -e"
        )


def numbers(text: str) -> list[int]:
    """Return the numbers of ranks of "2,4"."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise UsageError(f"-n {text}: write a number of ranks from 1, or several: 2,4")
    return found


def wanted_sizes(flags: dict[str, Any]) -> list[int]:
    """Return the sizes asked for, in bytes; one of nothing for a barrier."""
    if "begin" not in flags:
        return [0]
    if flags["sizes"]:
        return written.listed(flags["sizes"])
    begin, end = written.parsed(flags["begin"]), written.parsed(flags["end"])
    return written.between(begin, end, flags["factor"])


def described() -> str:
    """Return the machine in one line."""
    from lockstep.bench.lineup import cores
    from lockstep.record.environment import processor

    count, load = cores(), os.getloadavg()[0]
    return f"{processor()}, {count} core{'s' if count > 1 else ''}, load {load:.1f} at the start"


def spoken_command() -> str:
    """Return the command as it was typed, without the places of files."""
    kept: list[str] = []
    given = iter(sys.argv[1:])
    for word in given:
        if word in PLACES:
            next(given, None)
        elif not word.startswith(tuple(f"{place}=" for place in PLACES)):
            kept.append(word)
    return shlex.join(["lockstep", *kept])


def status(text: str) -> None:
    """Show on a terminal what is going on, on a line that the next one replaces."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def save_text(path: Path, text: str) -> None:
    """Write a file; FileError where that cannot be done."""
    try:
        path.write_text(text)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from error
