"""Running a recorded program again, and collecting the wanted steps."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.launcher.rank_process import run_code
from lockstep.launcher.run_folder import RESUME, RUN
from lockstep.record.program import select_variables
from lockstep.record.sources import find_named_variables
from lockstep.redaction import redact
from lockstep.tools.check.session_launch import launch_session
from lockstep.tools.replay.recorded_program import Base, Program
from lockstep.tools.replay.result import Replay, ReplayRequest
from lockstep.tools.replay.stored_sources import StoredSources

__all__ = ["run_program"]

DEBUGGER_LEFT = "DebuggerLeft"  # the class name of the exception


def run_program(program: Program, base: Base, request: ReplayRequest) -> Replay:
    """Compute steps of a recorded run again, starting from a checkpoint.

    Secrets in the failure of the result are redacted, as they are in records.

    Args:
        program: The program of the run.
        base: The checkpoint, or the beginning.
        request: The steps and the number of ranks.
    """
    with _environment(program):
        order = (program, base, request)
        run = launch_session(_start, order, request.ranks, has_terminal=request.debug)
    steps = run.values[0]
    stop = steps.pop() if steps and isinstance(steps[-1], dict) else None
    failure = "" if run.error is None else redact(str(run.error))
    is_left = run.error is not None and run.error.exception == DEBUGGER_LEFT
    if not failure and len(steps) != request.last + 1 - request.first:
        failure = f"the program ended before step {request.last} was finished"
    return Replay(
        steps,
        base=base.steps,
        seconds=run.seconds,
        failure=failure,
        details=run.details,
        is_left=is_left,
        stop=redact(stop),
    )


@contextlib.contextmanager
def _environment(program: Program) -> Iterator[None]:
    """Set the recorded variables in this process, which ranks inherit, while the body runs.

    A variable that the stored sources name is removed if the recorded process did not have it. For
    other variables that torch reads when it is loaded, the ranks get a new fork server.
    """
    before = dict(os.environ)
    here = select_variables(before)
    recorded = program.environ
    sources: Iterable[bytes] = ()
    if program.sources is not None:
        sources = StoredSources(program.sources).contents()
    for name in (*here, *find_named_variables(sources, before), RUN, RESUME):
        os.environ.pop(name, None)
    os.environ.update({**program.variables, **recorded})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- on a rank ------------------------------------------------------------------------------


def _start(
    record: Callable[[Any], None],
    folder: Path,
    program: Program,
    base: Base,
    request: ReplayRequest,
) -> tuple[Any, Callable[[], None]]:
    """Return the session of a rank, and a function that runs the program."""
    from lockstep.tools.replay.replay_session import ReplaySession

    trainer = program.launch, program.trainer
    session = ReplaySession(request, trainer, base.checkpoint, record)
    return session, partial(_run_program, program, folder)


def _run_program(program: Program, folder: Path) -> None:
    """Run the recorded program as the Python interpreter would."""
    import torch

    with contextlib.suppress(OSError):  # another machine may not have this folder
        os.chdir(program.cwd)
    if program.kind == "recipe":
        _run_recipe(program.options, folder)
        return
    sources = None
    if program.sources is not None:
        sources = StoredSources(program.sources)
        sources.install()
    if program.torch_seed is not None:  # the recorded initial seed, for a program that sets none
        torch.manual_seed(program.torch_seed)
    sys.argv[:] = [program.target, *program.arguments]
    kind = "module" if program.kind == "module" else "script"
    script = os.path.normpath(os.path.join(program.cwd, program.target))
    first = program.cwd if kind == "module" else os.path.dirname(os.path.realpath(script))
    if program.path is None:
        sys.path[0] = first
    else:
        sys.path[:] = [*program.path, *(entry for entry in sys.path if entry not in program.path)]
    source = None if sources is None or kind == "module" else sources.read(script)
    run_code(kind, program.target, source)


def _run_recipe(recorded: Mapping[str, Any], folder: Path) -> None:
    from lockstep.tools.recipes.digits import Options, train

    known = {field.name for field in fields(Options)}
    options = Options(**{name: value for name, value in recorded.items() if name in known})
    train(replace(options, quiet=True), str(folder / "run"))
