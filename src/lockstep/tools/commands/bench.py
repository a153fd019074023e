"""`lockstep bench`: one command per collective, `lockstep bench all_reduce` and others."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.files import write_output
from lockstep.formatting import format_quantity, format_size, parse_sizes
from lockstep.kernel.errors import UsageError, WorkError
from lockstep.launcher.signals import exiting_on_sigterm
from lockstep.messages import log
from lockstep.tools.bench.measured_collectives import COLLECTIVES, Collective
from lockstep.tools.commands.options import parse_rank_counts

if TYPE_CHECKING:
    from lockstep.tools.bench.ranks import BenchPlan
    from lockstep.tools.bench.results import Measurement

__all__ = ["RANKS_HELP", "command", "describe_command", "describe_machine"]

RANKS_HELP = "Numbers of ranks, measured one after another: 2 or 2,4."
SIZES = "4,16,64,256,1K,4K,16K,64K,256K,1M,4M,16M,64M"
WAIT_TIMEOUT = 120.0  # seconds that a rank waits for another one
START_TIMEOUT = 60.0  # seconds until all ranks have started
PATH_OPTIONS = ("--json", "--plot")  # private, left out of recorded commands
# Open MPI starts more ranks than cores only with these settings; others ignore them.
OVERSUBSCRIBE = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}


def make_command(collective: Collective) -> click.Command:
    """Return the command that measures a collective."""

    def measure(**flags: Any) -> None:
        run_bench(collective, flags)

    text = f"""Measure {collective.name}: {collective.description}.

    The backends take turns with one block of calls each. Inputs are rewritten before
    each call, all ranks start together, and the last result of each block is checked.
    The columns are those of nccl-tests, with the median and quantiles over calls of the
    slowest rank's time. A narrow terminal shows fewer of them.
    """
    options: list[click.Parameter] = [
        click.Option(
            ["-n", "--nprocs"], default="2", show_default=True,
            help=RANKS_HELP,
        ),
        click.Option(
            ["--backend"],
            help="The reference backend.  [default: lockstep if it is built, else gloo]",
        ),
        click.Option(
            ["--vs"], default="", metavar="NAMES",
            help="Backends to compare with: gloo,mpi.  [default: none]",
        ),
        click.Option(
            ["--seconds"], type=click.FloatRange(0, min_open=True), default=0.4, show_default=True,
            metavar="SECONDS", help="Seconds of measurement per backend and size.",
        ),
        click.Option(
            ["--sizes"], default=SIZES, metavar="SIZES", hidden=collective.name == "barrier",
            help="Sizes in bytes: 4,64K,1M.  [default: from 4 to 64M in steps of 4]",
        ),
        click.Option(["--bind"], is_flag=True, help="Bind each rank to one core, round-robin."),
        click.Option(
            ["--json", "json_file"], type=click.Path(path_type=Path),
            help="Write a list of the results to this file.",
        ),
        click.Option(
            ["--plot"], type=click.Path(path_type=Path), help="Write a plot to this .svg file."
        ),
    ]  # fmt: skip
    return click.Command(
        collective.name, callback=measure, params=options, help=text,
        short_help=collective.description,
    )  # fmt: skip


def run_bench(collective: Collective, flags: dict[str, Any]) -> None:
    """Measure with each number of ranks; print and write the results."""
    counts = parse_rank_counts("-n", flags["nprocs"])
    sizes = [0] if collective.name == "barrier" else parse_sizes(flags["sizes"])
    validate(flags)
    others = [name for name in flags["vs"].split(",") if name]
    names = list(dict.fromkeys([flags["backend"] or find_reference_backend(), *others]))
    if names[0] == "mpi":
        raise UsageError("--backend mpi: MPI is only compared with; write --vs mpi")
    require_memory(max(sizes), max(counts), len(names))
    from lockstep.tools.bench import results as tables
    from lockstep.tools.bench.ranks import BenchPlan
    from lockstep.tools.report.terminal import print_sentences, print_table

    machine = describe_machine()
    typed = describe_command()
    click.echo(f"# {machine}\n# {typed}")
    everything: list[Measurement] = []
    records: list[dict[str, Any]] = []
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
            plan = BenchPlan(
                collective=collective.name,
                ranks=count,
                backends=names,
                sizes=sizes,
                seconds=flags["seconds"],
                is_bound=flags["bind"],
                barrier=f"{folder}/start-barrier",
                timeout=WAIT_TIMEOUT,
            )
            measured = measure_on_ranks(plan, folder)
        click.echo(f"\n# {collective.name} on {count} ranks")
        rows: list[tuple[str, ...]] = []
        for size in dict.fromkeys(one.size for one in measured):
            results = [one for one in measured if one.size == size]
            rows += tables.rows(results)
            done = (one for one in results if one.times)
            records += [tables.record(one, results[0], machine, typed) for one in done]
        numbers = [name for name in tables.COLUMNS if name != "backend"]
        print_table(tables.COLUMNS, rows, tables.OPTIONAL, numbers)
        print_sentences(*tables.explain_columns(measured[0]), *tables.list_errors(measured))
        everything += measured
    if flags["json_file"]:
        write_output(flags["json_file"], json.dumps(records, indent=1) + "\n")
    if flags["plot"] and records:
        from lockstep.tools.bench.plot import draw

        write_output(flags["plot"], draw(everything, machine, typed).svg())
    check_results(everything)


def measure_on_ranks(plan: BenchPlan, folder: str) -> list[Measurement]:
    """Start the ranks, by mpiexec if MPI is measured; return the results of rank 0."""
    from lockstep.launcher.launch import launch
    from lockstep.tools.bench.ranks import measure
    from lockstep.tools.bench.results import Measurement
    from lockstep.tools.bench.start_barrier import StartBarrier

    StartBarrier.prepare(plan.barrier, plan.ranks)
    share = 10 * plan.seconds + 10  # of one backend at one size; its calls take but a part of it
    limit = START_TIMEOUT + (1 + len(plan.backends)) * len(plan.sizes) * share
    if "mpi" not in plan.backends:
        return launch(measure, (plan,), plan.ranks, timeout=limit)[0]
    path = Path(folder) / "results.json"
    program = [sys.executable, "-m", "lockstep.tools.bench.ranks", json.dumps(asdict(plan))]
    process = subprocess.Popen(
        [find_mpiexec(), "-n", str(plan.ranks), *program, str(path)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env=os.environ | OVERSUBSCRIBE, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise WorkError(f"mpi: the ranks have not ended within {limit:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not path.exists():
        last = [line.strip() for line in output.splitlines() if line.strip()][-1:]
        raise WorkError(f"mpi: the ranks failed; last output: {''.join(last)}")
    return [Measurement(**one) for one in json.loads(path.read_text())]


def find_mpiexec() -> str:
    """Return the `mpiexec` beside this Python, or else the first one on PATH.

    Raises:
        UsageError: mpi4py or mpiexec is not installed.
    """
    beside = Path(os.path.abspath(sys.executable)).parent / "mpiexec"
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if importlib.util.find_spec("mpi4py") is None or program is None:
        raise UsageError("--vs mpi needs mpi4py and an MPI: pip install mpi4py mpich")
    return program


def check_results(everything: list[Measurement]) -> None:
    """Raise WorkError if a result is wrong, or if nothing could be measured."""
    wrong = [result for result in everything if result.wrong]
    if wrong:
        names = ", ".join(sorted({result.backend for result in wrong}))
        elements = format_quantity(sum(result.wrong for result in wrong), "wrong element")
        raise WorkError(f"wrong results of {names}: {elements} in checked calls, over all ranks")
    if not any(result.times for result in everything):
        raise WorkError(f"nothing could be measured: {everything[0].error}")


def find_reference_backend() -> str:
    """Return the default backend for CPU tensors, with a note if `lockstep` is unavailable."""
    from lockstep.comm.backend import reason_unavailable
    from lockstep.launcher.world import cpu_backend

    name = cpu_backend()
    reason = reason_unavailable()
    if name != "lockstep" and reason is not None:
        log(f"the reference is {name}, because the backend 'lockstep' is not available: {reason}")
    return name


def validate(flags: dict[str, Any]) -> None:
    """Raise UsageError for options that cannot be used."""
    from torch.distributed import is_backend_available

    for name in filter(None, flags["vs"].split(",")):
        if name == "mpi":
            find_mpiexec()
        elif not is_backend_available(name):
            raise UsageError(f"--vs {name}: torch has no such backend here")
    if flags["bind"] and not hasattr(os, "sched_setaffinity"):
        raise UsageError("--bind: this system cannot bind a process to a core")
    if flags["plot"] and flags["plot"].suffix != ".svg":
        raise UsageError(f"--plot {flags['plot']}: the suffix must be .svg")
    for file in (flags["json_file"], flags["plot"]):
        if file and not file.absolute().parent.is_dir():
            raise UsageError(f"{file} cannot be written: no such folder: {file.parent}")


def require_memory(size: int, ranks: int, backends: int) -> None:
    """Raise UsageError if the buffers of all ranks do not fit into memory."""
    import psutil

    needed = size * ranks * (2 * backends + 5)
    free = psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"{format_size(size)} on {ranks} ranks of {backends} backends needs about "
            f"{format_size(needed)} of memory, but only {format_size(free)} are available: choose "
            "smaller --sizes"
        )


def describe_machine() -> str:
    """Return the machine in one line."""
    from lockstep.processor_core import count_usable_cores, processor_name

    count = count_usable_cores()
    load = os.getloadavg()[0]
    cores = f"{count} core{'s' if count > 1 else ''}"
    return f"{processor_name()}, {cores}, load {load:.1f} at the start"


def describe_command() -> str:
    """Return the command as it was typed, without paths of files."""
    kept: list[str] = []
    given = iter(sys.argv[1:])
    for word in given:
        if word in PATH_OPTIONS:
            next(given, None)
        elif not word.startswith(tuple(f"{option}=" for option in PATH_OPTIONS)):
            kept.append(word)
    return shlex.join(["lockstep", *kept])


@click.group()
@click.pass_context
def command(ctx: click.Context) -> None:
    """Compare the backends of this machine with each other in one run."""
    ctx.with_resource(exiting_on_sigterm())


for each_collective in COLLECTIVES.values():
    command.add_command(make_command(each_collective))
