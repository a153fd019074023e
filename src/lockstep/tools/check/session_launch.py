"""Ranks that run a program in the session of a command, and what they recorded.

command ── launch ──> rank: opens the session, redirects output to a log, runs the program
        <─ what each rank recorded before it ended, and the message of the first failure
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.kernel.errors import RankError
from lockstep.launcher.launch import launch, launch_in_this_process
from lockstep.launcher.rank_process import run_code
from lockstep.launcher.signals import exiting_on_sigterm
from lockstep.training.session import SessionComplete, open_session

__all__ = ["SessionRun", "launch_session", "run_script"]

TAIL = 12
"""The number of lines shown of a failed rank's output."""

Start = Callable[..., tuple[Any, Callable[[], None]]]
"""A function of `record`, which stores a value, of a folder, and of further arguments. It returns a
session and a function that runs the program. The method `settle` of the session is called when the
program has ended, and `record_unfinished` if it fails."""


@dataclass(frozen=True)
class SessionRun:
    """The run of a program in a session.

    Attributes:
        values: The values that each rank recorded before it ended.
        seconds: The time from the start of the ranks to their end, in seconds.
        error: The first failure; None if every rank finished.
        details: The traceback and the last lines of output of the failed rank.
    """

    values: list[list[Any]]
    seconds: float
    error: RankError | None
    details: str


def launch_session(
    start: Start,
    arguments: Sequence[Any],
    ranks: int = 1,
    *,
    timeout: float | None = None,
    has_terminal: bool = False,
) -> SessionRun:
    """Run a program in a session on each rank, and return what the ranks recorded.

    Args:
        start: The function that opens the session of a rank.
        arguments: Its further arguments.
        ranks: The number of ranks.
        timeout: The time in seconds after which the ranks are terminated.
        has_terminal: Whether the ranks have this terminal, instead of a log.
    """
    with exiting_on_sigterm(), tempfile.TemporaryDirectory(prefix="lockstep-session-") as name:
        folder = Path(name)
        begun = time.monotonic()
        error: RankError | None = None
        try:
            order = (start, tuple(arguments), folder, has_terminal)
            launch(_run_rank, order, ranks, timeout=timeout, pass_rank=True)
        except RankError as failure:
            error = failure
        seconds = time.monotonic() - begun
        values = [list(_read_values(_record_of(folder, rank))) for rank in range(ranks)]
        details = "" if error is None else _describe_failure(error, folder)
        return SessionRun(values, seconds, error, details)


def _run_rank(
    rank: int, start: Start, arguments: tuple[Any, ...], folder: Path, has_terminal: bool
) -> None:
    """Run the program in this process, and record what the session finds."""
    if not has_terminal:
        _redirect_output(_log_of(folder, rank))
    os.environ["LOCKSTEP_RUN"] = str(folder)
    with _record_of(folder, rank).open("xb", buffering=0) as file:
        session, run = start(lambda value: pickle.dump(value, file), folder, *arguments)
        try:
            with open_session(session), launch_in_this_process():
                _run_to_end(run)
                session.settle()
        except SessionComplete:
            pass
        except BaseException:
            session.record_unfinished()
            raise


def _run_to_end(run: Callable[[], None]) -> None:
    """Run the program, which may end by `sys.exit(0)`."""
    try:
        run()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script in this process as `python SCRIPT` would."""
    sys.argv[:] = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    run_code("script", script)


def _log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _record_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pickle"


def _read_values(record: Path) -> Iterator[Any]:
    """Yield the values that a rank pickled into a file before it ended."""
    ends = FileNotFoundError, EOFError, pickle.UnpicklingError
    with contextlib.suppress(*ends), record.open("rb") as file:
        while True:
            yield pickle.load(file)


def _redirect_output(log: Path) -> None:
    """Redirect standard output and error to a file, and standard input to the null device."""
    for number, file, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        descriptor = os.open(file, flags, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.dup2(1, 2)


def _describe_failure(error: RankError, folder: Path) -> str:
    """Return the last lines of output of a failed rank, and its traceback."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        log = _log_of(folder, error.rank or 0)
        lines = log.read_text(errors="replace").splitlines()[-TAIL:]
    printed = [f"the last lines of rank {error.rank}:", *(f"    {line}" for line in lines)]
    return "\n".join([*(printed if lines else ()), *getattr(error, "__notes__", ())])
