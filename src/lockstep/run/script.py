"""Run a script or module on N ranks of this host, as `python` would run it alone."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from lockstep.errors import UsageError
from lockstep.run import preload
from lockstep.run.assignment import Assignment
from lockstep.run.channel import Message
from lockstep.run.job import Job
from lockstep.run.launch import bind_loopback

__all__ = ["run_script"]


def run_script(script: str, arguments: Sequence[str], nprocs: int, *, module: bool = False) -> None:
    """Run `script` on `nprocs` ranks and wait for them.

    Rank 0 inherits standard input, the others read an empty one. Raises RankError
    for the first rank that fails, UsageError where there is nothing to run.
    """
    if nprocs < 1:
        raise UsageError(f"--nproc-per-node {nprocs}: a world has at least one rank")
    if not module and not os.path.exists(script):
        raise UsageError(f"there is no script {script!r} in {os.getcwd()}")
    job = Job(preload.template().open_job(), nprocs, None)
    listening = bind_loopback()
    port = listening.getsockname()[1]
    assignment = Assignment(nprocs, "127.0.0.1", port, run=secrets.token_hex(4))
    job.start_store(listening.fileno(), port)
    listening.close()
    null = os.open(os.devnull, os.O_RDONLY)
    for rank in range(nprocs):
        task = _task(script, arguments, module, assignment.variables(rank))
        job.start_rank(rank, task, (null if rank else 0, 1, 2), null)
    os.close(null)
    try:
        error = job.watch(None)
    finally:
        job.terminate()
    if error is not None:
        raise error


def _task(
    script: str, arguments: Sequence[str], module: bool, variables: dict[str, str]
) -> Message:
    return {
        "task": "module" if module else "script",
        "target": script,
        "fresh": False,
        "environ": {"OMP_NUM_THREADS": "1", **os.environ, **variables},
        "cwd": os.getcwd(),
        "argv": [script, *arguments],
        "path": None,
        "first_path": os.getcwd() if module else os.path.dirname(os.path.realpath(script)),
    }
