"""Run a script, module or program on N ranks of this host, and supervise it.

lockstep run ── template ── rank 0 ── stdout, stderr ──┐
     │                 └─── rank 1 ── stdout, stderr ──┤
     └── reads every line, shows it, writes the logs <─┘
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from lockstep.errors import FileError, RankError, UsageError
from lockstep.files import make_folder
from lockstep.launcher import preload
from lockstep.launcher.assignment import Assignment
from lockstep.launcher.channel import Message
from lockstep.launcher.job import GRACE, Job
from lockstep.launcher.lingering import Lingering
from lockstep.launcher.output import Output
from lockstep.launcher.plan import STDERR, STDOUT, Plan
from lockstep.launcher.verdict import signal_name, spoken
from lockstep.messages import say

__all__ = ["Interrupted", "check_target", "run_plan"]

RUNS = "runs"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TAIL = 12  # lines of the failed rank that are shown again at the end


class Interrupted(Exception):
    """The launcher was told to stop, by signal `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal_name(number))
        self.number = number


def run_plan(plan: Plan) -> None:
    """Run what `plan` says and wait for it; nothing is left when this returns or raises.

    Raises RankError for the first rank that fails, after its last lines were
    shown; UsageError where there is nothing to run; FileError where its logs
    cannot be written; Interrupted after a signal.
    """
    check_target(plan)
    folder = _log_folder(plan)
    with _interruptible() as requests:
        job = _start(plan, folder)
        try:
            error = job.watch(tick=Lingering(job).look)
        except Interrupted as interruption:
            if sys.stderr.isatty():
                print(file=sys.stderr)  # the terminal has just shown ^C
            if job.running:
                say(f"{interruption}: ending {spoken(job.running)}")
            raise
        finally:
            _end(job, requests)
    _complain(job)
    if error is not None:
        raise _with_last_lines(job, error)


def check_target(plan: Plan) -> None:
    """Say once, before anything starts, what every rank would say."""
    check = {"script": _check_script, "module": _check_module, "program": _check_program}
    check[plan.kind](plan)


def _check_program(plan: Plan) -> None:
    if shutil.which(plan.target) is None:
        raise UsageError(f"there is no program {plan.target!r} that can be executed")


def _check_module(plan: Plan) -> None:
    """Find the module as an import would, but without running any of it."""
    places, name = [os.getcwd(), *sys.path], ""
    for part in plan.target.split("."):
        name = f"{name}.{part}" if name else part
        found = PathFinder.find_spec(name, places)
        if found is None:
            raise UsageError(f"there is no module {name!r}, looked for from {os.getcwd()}")
        places = list(found.submodule_search_locations or ())
    if places and PathFinder.find_spec(f"{name}.__main__", places) is None:
        raise UsageError(f"{name!r} is a package without a __main__ module")


def _check_script(plan: Plan) -> None:
    path = Path(plan.target)
    if not path.exists():
        raise UsageError(f"there is no script {plan.target!r} in {os.getcwd()}")
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise UsageError(f"{plan.target!r} is a folder without a __main__.py")
        return
    try:
        compile(path.read_bytes(), plan.target, "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"{plan.target!r} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{plan.target}{line} is no Python: {said}") from None


def _log_folder(plan: Plan) -> Path | None:
    """Make the run's folder; None where the usual place cannot be written."""
    stem = plan.target.rpartition(".")[2] if plan.kind == "module" else Path(plan.target).stem
    name = f"{stem or 'run'}-{datetime.datetime.now():%Y-%m-%d-%H%M}"
    parent = Path(plan.log_dir) if plan.log_dir is not None else Path(RUNS)
    try:
        return _fresh(parent, name)
    except OSError as error:
        if plan.log_dir is not None:
            raise FileError(f"--log-dir {plan.log_dir} cannot be used: {error.strerror}") from None
        say(f"no logs are kept: {parent}/{name} cannot be made ({error.strerror})")
        return None


def _fresh(parent: Path, name: str) -> Path:
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            make_folder(folder, exist_ok=False)
        except FileExistsError:
            if not parent.is_dir():
                raise
            number += 1
        else:
            return folder


def _start(plan: Plan, folder: Path | None) -> Job:
    run = plan.run or secrets.token_hex(4)
    first = plan.host * plan.nprocs
    template = preload.template(trains=_trains(plan))
    job = Job(template.open_job(), range(first, first + plan.nprocs))
    try:
        port = job.serve_store(plan.address, plan.port) if plan.host == 0 else plan.port
        store = job.create_store() if plan.hosts == 1 else ""
        assignment = Assignment(
            plan.nprocs, plan.address, port, run, plan.hosts, plan.host, plan.role, store
        )
        null = os.open(os.devnull, os.O_RDONLY)
        for local_rank in range(plan.nprocs):
            rank = first + local_rank
            task = _task(plan, assignment.variables(local_rank), folder)
            job.start(rank, task, null, _output(plan, local_rank, rank, folder))
        os.close(null)
    except BaseException:
        job.terminate()
        raise
    return job


def _trains(plan: Plan) -> bool:
    with contextlib.suppress(OSError):
        return plan.kind == "script" and preload.trains(Path(plan.target).read_bytes())
    return False


def _output(plan: Plan, local_rank: int, rank: int, folder: Path | None) -> Output:
    consoles: list[BinaryIO | None] = [
        console.buffer if plan.shows(local_rank, stream) else None
        for stream, console in ((STDOUT, sys.stdout), (STDERR, sys.stderr))
    ]
    log = None if folder is None else folder / f"rank-{rank}.log"
    prefixed = plan.nprocs * plan.hosts > 1
    return Output(rank, log, (consoles[0], consoles[1]), prefixed=prefixed)


def _task(plan: Plan, variables: dict[str, str], folder: Path | None) -> Message:
    target = plan.target
    module = plan.kind == "module"
    where = {} if folder is None else {"LOCKSTEP_RUN": str(folder.resolve())}
    return {
        "task": plan.kind,
        "target": target,
        "fresh": plan.fresh,
        "flags": preload.interpreter_flags(),
        "environ": {"OMP_NUM_THREADS": "1", **os.environ, **variables, **where},
        "cwd": os.getcwd(),
        "argv": [*(() if plan.kind == "program" else (target,)), *plan.arguments],
        "path": None,
        "first_path": os.getcwd() if module else os.path.dirname(os.path.realpath(target)),
    }


def _end(job: Job, requests: list[int]) -> None:
    """End what still runs; at once where that was asked for twice, now or before."""
    try:
        job.terminate(grace=GRACE if len(requests) < 2 else 0.0)
    except Interrupted:
        job.terminate(grace=0.0)


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Turn the signals that ask a program to stop into an exception, twice at most.

    Gives the list of those that came.
    """
    requests: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        requests.append(number)
        if len(requests) <= 2:
            raise Interrupted(number)

    # What is ignored already stays so: nohup does that to SIGHUP.
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _with_last_lines(job: Job, error: RankError) -> RankError:
    """Show the failed rank's last lines again, where others printed between; name its log."""
    output = job.outputs.get(-1 if error.rank is None else error.rank)
    if output is None:
        return error
    lines = list(output.last)[-TAIL:]
    if len(job.outcomes) > 1 and lines:
        say(f"the last lines of rank {error.rank}:")
        sys.stderr.flush()
        sys.stderr.buffer.write(b"".join(b"    " + line + b"\n" for line in lines))
        sys.stderr.flush()
    log = "" if output.log is None else f"; its log: {output.log}"
    told = RankError(f"{error}{log}")
    told.rank, told.status = error.rank, error.status
    return told


def _complain(job: Job) -> None:
    for output in job.outputs.values():
        if output.complaint is not None:
            say(output.complaint)
