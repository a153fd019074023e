"""`lockstep scale`: change the number of ranks of an elastic run."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from lockstep.elastic.scale_request import request_ranks
from lockstep.formatting import format_quantity
from lockstep.kernel.errors import FileError, UsageError
from lockstep.launcher.run_folder import RUNS, find_run, read_description
from lockstep.messages import log

__all__ = ["command"]

TIMEOUT = 5.0  # seconds to wait until the launcher has read the request
POLL = 0.02  # seconds between two checks


@click.command()
@click.argument("run")
@click.argument("ranks", type=int)
@click.option(
    "--runs", "parent", metavar="DIR", default=RUNS, help=f"Folder of runs. Default: {RUNS}."
)
def command(run: str, ranks: int, parent: str) -> None:
    """Change the number of ranks of RUN, which `lockstep run --min A --max B` has started.

    RUN is its folder or its name in --runs. New ranks join, or the last ones leave, between two
    steps. From then on the run keeps RANKS ranks.

    Exit status: 0 the run has accepted the request, 2 usage error.
    """
    folder = find_run(run, Path(parent), "lockstep scale")
    _check(folder, ranks)
    try:
        request = request_ranks(folder, ranks)
    except OSError as error:
        raise FileError(f"{folder} cannot be written: {error.strerror}") from None
    deadline = time.monotonic() + TIMEOUT
    while request.exists():
        if time.monotonic() >= deadline:
            request.unlink(missing_ok=True)
            raise UsageError(f"{folder} is not running: no launcher has answered in {TIMEOUT:g} s")
        time.sleep(POLL)
    log(f"{folder} gets {format_quantity(ranks, 'rank')} at its next safe point")
    sys.exit(0)


def _check(folder: Path, ranks: int) -> None:
    """Raise UsageError if a run cannot have this number of ranks, or has ended."""
    launch = read_description(folder)
    if launch is None or launch.min_nprocs is None:
        raise UsageError(
            f"{folder} is not an elastic run: start it with lockstep run --min A --max B"
        )
    if launch.exit_status is not None:
        raise UsageError(
            f"{folder} has ended; continue it with: lockstep run --resume {folder} --max {ranks}"
        )
    if ranks < launch.min_nprocs:
        raise UsageError(
            f"{folder} cannot continue with {format_quantity(ranks, 'rank')}: it was started with "
            f"--min {launch.min_nprocs}"
        )
