"""`lockstep run`: run a script, module or program on N ranks of this host, and supervise it.

lockstep run ── fork server ── rank 0 ── stdout, stderr ──┐
     │                    └─── rank 1 ── stdout, stderr ──┤
     └── reads every line, shows it, writes the logs <────┘
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.formatting import format_numbered
from lockstep.kernel.errors import FileError, LockstepError, RankError
from lockstep.launcher.environment import DEFAULTS, OF_ELASTIC, RankEnvironment
from lockstep.launcher.failure_attribution import (
    Outcome,
    describe_own_failure,
    find_same_failures,
    is_consequence,
    signal_name,
)
from lockstep.launcher.failure_codes import STOPPED
from lockstep.launcher.fork_server import (
    check_open_files,
    get_fork_server,
)
from lockstep.launcher.launch_config import LaunchConfig
from lockstep.launcher.listening_socket import warn_of_strangers
from lockstep.launcher.output import RankOutput
from lockstep.launcher.rank_stores import choose_port
from lockstep.launcher.run_folder import (
    RESUME,
    RUN,
    RUNS,
    LaunchDescription,
    claim_newest_run,
    create_run_folder,
    describe_launch,
    find_linked_runs,
    is_link_to_sibling,
    locate_renamed,
    name_run,
    release_run,
    remove_old_name,
    wait_until_free,
    write_description,
)
from lockstep.launcher.signals import receiving, reports_on_request
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.launcher.target import check_target
from lockstep.messages import log
from lockstep.portable.variables import PORTABLE

__all__ = [
    "Interrupted",
    "RunFolder",
    "StartRanks",
    "StartedRanks",
    "launch_script",
    "open_store",
    "open_supervisor",
    "start_rank",
    "start_ranks",
    "terminating",
]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OF_LAUNCH = (RUN, RESUME, *OF_ELASTIC)  # variables that nested launches do not inherit
TAIL = 12  # lines of the failed rank that are shown again at the end


class Interrupted(SystemExit):
    """The signal `number` asked the launcher to stop; `has_stopped`: whether the run can resume."""

    has_stopped = False

    def __init__(self, number: int) -> None:
        self.number = number
        self.exit_status = 128 + number
        super().__init__(self.exit_status)


@dataclass(frozen=True)
class RunFolder:
    """The run folder of this launch."""

    path: Path
    is_resumed: bool = False
    description: LaunchDescription | None = None

    def settle(self) -> RunFolder:
        """Return the folder with its final path, after the ranks: a trainer may have renamed it."""
        return dataclasses.replace(self, path=remove_old_name(self.path))

    def record(self, exit_status: int | None) -> None:
        """Write the launch's description; if that fails, print why and continue without it."""
        if self.description is None:
            return
        description = dataclasses.replace(self.description, exit_status=exit_status)
        try:
            write_description(self.path, description)
        except OSError as error:
            log(f"{self.path}/launch.json cannot be written: {error.strerror}")

    def variables(self) -> dict[str, str]:
        """Return the environment variables that describe the folder to the ranks."""
        return {RUN: str(self.path.resolve()), **({RESUME: "1"} if self.is_resumed else {})}


class StartedRanks(NamedTuple):
    """Ranks that a launch has started, or will start while it waits.

    Attributes:
        ranks: Their supervisor.
        wait: Waits for them, as `RankSupervisor.wait` does.
    """

    ranks: RankSupervisor
    wait: Callable[[float, Callable[[], bool]], RankError | None]


StartRanks = Callable[[LaunchConfig, RunFolder], StartedRanks]


def launch_script(
    config: LaunchConfig,
    start: StartRanks | None = None,
    *,
    exits: bool = False,
) -> int:
    """Run what `config` describes and wait for it; no process remains afterwards.

    Args:
        config: The configuration of the launch.
        start: Function that starts the ranks; None for `start_ranks`.
        exits: Whether this process exits afterwards. It ignores signals from the time at which
            the ranks have stopped on request: a batch system that signals every process of a job
            may reach this one last.

    Returns:
        The exit status: 0, or 75 if the ranks stopped on request and can be resumed.

    Raises:
        RankError: A rank failed; the first one is named, after its last lines were shown.
        UsageError: The target cannot be run, or another process uses the run to resume.
        FileError: The logs cannot be written.
        Interrupted: A signal asked this process to stop.
    """
    check_target(config.kind, config.target)
    check_open_files(config.nprocs)
    folder = _open_run_folder(config)
    status: int | None = 1
    has_stopped = False
    try:
        folder.record(None)
        status = _launch(config, folder, start or start_ranks, exits)
        has_stopped = status == STOPPED
    except (LockstepError, Interrupted) as error:
        status = error.exit_status
        has_stopped = isinstance(error, Interrupted) and error.has_stopped
        raise
    finally:
        folder = folder.settle()
        folder.record(status)
        release_run(folder.path)
        if has_stopped:
            log(_describe_stop(config, folder))
    if not has_stopped:
        linked = ", ".join(map(str, find_linked_runs(folder.path)))
        log(f"the run is in {folder.path}" + (f", its record in {linked}" if linked else ""))
    return status


def _launch(
    config: LaunchConfig,
    folder: RunFolder,
    start: StartRanks,
    exits: bool,
) -> int:
    with reports_on_request(), _interruptible() as requests, _live_region() as draw:
        ranks, wait = start(config, folder)
        ranks.processes.show_progress = draw
        try:
            error = wait(config.grace, lambda: signal.SIGTERM in requests)
        except BrokenPipeError:  # as in: lockstep run train.py | head
            log(f"SIGPIPE: ending {format_numbered(ranks.processes.noun, ranks.processes.running)}")
            raise Interrupted(signal.SIGPIPE) from None
        except Interrupted as interruption:
            if interruption.number == signal.SIGINT and sys.stderr.isatty():
                print(file=sys.stderr)  # the terminal has just shown ^C
            if ranks.processes.running:
                running = format_numbered(ranks.processes.noun, ranks.processes.running)
                log(f"{signal_name(interruption.number)}: ending {running}")
            _terminate(ranks, requests)
            interruption.has_stopped = ranks.has_stopped
            raise
        finally:
            _terminate(ranks, requests)
        if exits and error is None and ranks.has_stopped:
            requests.append(signal.SIGTERM)
    _report_log_errors(ranks)
    if error is not None:
        error = _show_failure(ranks, error)
    elif ranks.has_stopped:
        return STOPPED
    if ranks.was_asked_to_stop:
        if error is not None:
            log(str(error))
        raise Interrupted(signal.SIGTERM)
    if error is not None:
        raise error
    return 0


def _describe_stop(config: LaunchConfig, folder: RunFolder) -> str:
    command = shlex.join(["lockstep", "run", "--resume", str(folder.path)])
    if folder.description is not None and folder.description.is_redacted:
        command += " SCRIPT ARGUMENTS (they contain a secret, which is not stored)"
    where = " on every host, with the same options" if config.nnodes > 1 else ""
    return f"stopped on request; continue with: {command}{where}"


def _open_run_folder(config: LaunchConfig) -> RunFolder:
    """Return this launch's folder, a new one or that of the run to resume, marked as used."""
    description = describe_launch(
        config.kind,
        config.target,
        config.arguments,
        config.nprocs,
        config.nnodes,
        config.min_nprocs,
    )
    parent = Path(config.log_dir or RUNS)
    resumed = config.resumed_run
    if config.resumes_newest:
        if claimed := claim_newest_run(parent, description):
            resumed, launched = claimed
            if launched.portable is False:
                os.environ[PORTABLE] = "0"
                description = dataclasses.replace(description, portable=False)
    elif resumed is not None and config.node_rank == 0:
        wait_until_free(resumed)
    if resumed is None:
        path = _make_log_folder(config)
        wait_until_free(path)
        if config.resumes_newest:
            log(f"--resume auto: {parent} has no run of this command to continue; a new one starts")
        return RunFolder(path, description=description)
    if is_link_to_sibling(resumed):  # such as "latest", which is not this launch's to remove
        resumed = locate_renamed(resumed)
    if config.resumes_newest:
        log(f"--resume auto: continuing {resumed}")
    # Several hosts may share the folder; host 0 writes.
    own = description if config.node_rank == 0 else None
    return RunFolder(resumed, is_resumed=True, description=own)


def _make_log_folder(config: LaunchConfig) -> Path:
    """Make the run's folder."""
    stem = config.target.rpartition(".")[2] if config.kind == "module" else Path(config.target).stem
    name = config.name or name_run(stem or "run")
    parent = Path(config.log_dir or RUNS)
    path = create_run_folder(parent, name, "give a folder that you can write to with --log-dir")
    if config.name not in (None, path.name):
        log(f"{parent / name} holds an earlier run: this one is in {path}")
    return path


def start_ranks(config: LaunchConfig, folder: RunFolder) -> StartedRanks:
    """Start the ranks of this host."""
    first = config.node_rank * config.nprocs
    ranks = open_supervisor(config, range(first, first + config.nprocs))
    with terminating(ranks):
        environment = open_store(config, ranks)
        for local_rank in range(config.nprocs):
            variables = {**environment.variables(local_rank), **folder.variables()}
            start_rank(config, folder, ranks, first + local_rank, local_rank, variables)
    return StartedRanks(ranks, ranks.wait)


@contextlib.contextmanager
def terminating(ranks: RankSupervisor) -> Iterator[None]:
    """End the ranks if the body, which starts them, fails."""
    try:
        yield
    except BaseException:
        _terminate(ranks, [])
        raise


def open_supervisor(config: LaunchConfig, ranks: range) -> RankSupervisor:
    """Return the supervisor of ranks that have not been started yet."""
    return RankSupervisor(
        get_fork_server().open_launch(),
        ranks,
        hang_policy=config.hang_policy,
        noun="member" if config.is_elastic else "rank",
    )


def open_store(config: LaunchConfig, ranks: RankSupervisor) -> RankEnvironment:
    """Serve the ranks' stores; return the variables that tell this host's ranks where they are."""
    port = config.master_port
    is_single_host = config.nnodes == 1
    if is_single_host:
        port = choose_port(config.master_addr, port)
    elif config.node_rank == 0:
        port = ranks.processes.stores.serve(config.master_addr, port)
        if not config.is_elastic:
            warn_of_strangers(config.master_addr, port)
    return RankEnvironment(
        nprocs=config.nprocs,
        master_addr=config.master_addr,
        master_port=port,
        run_id=config.run_id or secrets.token_hex(4),
        nnodes=config.nnodes,
        node_rank=config.node_rank,
        store=ranks.processes.stores.create() if is_single_host else "",
        is_served=not is_single_host,
    )


def start_rank(
    config: LaunchConfig,
    folder: RunFolder,
    ranks: RankSupervisor,
    rank: int,
    local_rank: int,
    variables: dict[str, str],
) -> None:
    """Start one rank, with `variables` in its environment."""
    output = _open_output(config, local_rank, rank, folder)
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        has_input = config.node_rank == local_rank == 0
        task = _script_task(config, variables)
        ranks.processes.start_rank(rank, task, null, output, has_input=has_input)
    finally:
        os.close(null)


def _open_output(config: LaunchConfig, local_rank: int, rank: int, folder: RunFolder) -> RankOutput:
    is_shown = config.shown is None or local_rank in config.shown
    stdout = sys.stdout.buffer if is_shown and config.shows_stdout else None
    stderr = sys.stderr.buffer if is_shown else None
    log_file = folder.path / f"rank-{rank}.log"
    prefixed = config.nprocs * config.nnodes > 1 or config.is_elastic
    separator = None
    if folder.is_resumed:
        separator = f"--- resumed at {datetime.datetime.now():%Y-%m-%d %H:%M:%S} ---"
    try:
        return RankOutput(rank, log_file, (stdout, stderr), prefixed=prefixed, separator=separator)
    except OSError as error:
        raise FileError(f"{log_file} cannot be written: {error.strerror}") from None


def _script_task(config: LaunchConfig, variables: dict[str, str]) -> dict[str, Any]:
    target = config.target
    module = config.kind == "module"
    inherited = {name: value for name, value in os.environ.items() if name not in OF_LAUNCH}
    return {
        "task": config.kind,
        "target": target,
        "environ": {**DEFAULTS, **inherited, **variables},
        "cwd": os.getcwd(),
        "argv": [*(() if config.kind == "program" else (target,)), *config.arguments],
        "path": None,
        "first_path": os.getcwd() if module else os.path.dirname(os.path.realpath(target)),
    }


def _terminate(ranks: RankSupervisor, requests: list[int]) -> None:
    """End the ranks that still run; without a grace period once a second signal has come."""
    try:
        ranks.terminate(grace=None if len(requests) < 2 else 0.0)
    except Interrupted:
        ranks.terminate(grace=0.0)


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Raise Interrupted for signals that ask a program to stop (SIGNALS), at most twice.

    Yields the list of signals that were received. SIGTERM as the first signal raises nothing.
    If there was any signal, later ones are ignored, because the program is about to exit.
    """
    requests: list[int] = []

    def interrupt(number: int) -> None:
        requests.append(number)
        is_first = len(requests) == 1
        if len(requests) == 2 or (is_first and number != signal.SIGTERM):
            raise Interrupted(number)

    with receiving(SIGNALS, interrupt) as restored:
        try:
            yield requests
        finally:
            if requests:
                restored.update(dict.fromkeys(restored, signal.SIG_IGN))


@contextlib.contextmanager
def _live_region() -> Iterator[Callable[[Sequence[str]], None]]:
    """Yield what draws a rank's progress below the output, if standard error is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda lines: None
        return
    from lockstep.launcher.live_region import LiveRegion  # imports rich, which takes 0.1 s

    with contextlib.closing(LiveRegion(sys.stderr)) as region:
        yield region.draw


def _show_failure(ranks: RankSupervisor, error: RankError) -> RankError:
    """Show what the error of a failed rank leaves out; add the user's line and the log's path."""
    failure = ranks.processes.outcomes.get(-1 if error.rank is None else error.rank)
    if failure is None or failure.rank not in ranks.processes.outputs:
        return error
    outcomes = list(ranks.processes.outcomes.values())
    same = find_same_failures(outcomes, failure)
    if same:
        sentence = describe_own_failure(outcomes, failure)
        _show_other_errors(outcomes, same)
    else:
        sentence = str(error)
        _show_last_lines(ranks, failure.rank)
    complete = RankError(f"{sentence}{_describe_log(ranks, failure.rank, same)}")
    complete.rank = error.rank
    complete.status = error.status
    return complete


def _show_last_lines(ranks: RankSupervisor, rank: int) -> None:
    """Show the failed rank's last lines again if there are other ranks."""
    lines = list(ranks.processes.outputs[rank].last_lines)[-TAIL:]
    if len(ranks.processes.outcomes) > 1 and lines:
        log(f"the last lines of {ranks.processes.noun} {rank}:")
        sys.stderr.flush()
        with contextlib.suppress(OSError):  # a full disk
            sys.stderr.buffer.write(b"".join(b"    " + line + b"\n" for line in lines))
        sys.stderr.flush()


def _show_other_errors(outcomes: list[Outcome], same: list[Outcome]) -> None:
    """Show other Lockstep errors of other ranks, whose tracebacks are only in the logs."""
    for outcome in outcomes:
        is_own = outcome.error is not None and outcome.error["plain"]
        if is_own and outcome not in same and not is_consequence(outcome):
            log(describe_own_failure(outcomes, outcome))


def _describe_log(ranks: RankSupervisor, rank: int, same: list[Outcome]) -> str:
    log_file = ranks.processes.outputs[rank].log
    if log_file is None:
        return ""
    folder = locate_renamed(log_file.parent)
    if len(same) < 2:
        # An error of Lockstep may name another rank, or none.
        whose = f"the log of {ranks.processes.noun} {rank}" if same else "its log"
        return f"; {whose}: {folder / log_file.name}"
    who = format_numbered(ranks.processes.noun, [outcome.rank for outcome in same])
    return f"; {who} raised this, see {folder}/rank-*.log"


def _report_log_errors(ranks: RankSupervisor) -> None:
    for output in ranks.processes.outputs.values():
        if output.log_error is not None:
            log(output.log_error)
