"""The program of a recorded run, and all that is needed to run it again.

    record.jsonl, checkpoints ──> Program, Base ──> ranks

This module only reads files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoint.folder import MANIFEST, find_checkpoints, verify
from lockstep.kernel.errors import UsageError
from lockstep.launcher.run_folder import CHECKPOINTS
from lockstep.portable.variables import OF_TORCH, PORTABLE
from lockstep.record.columns import as_dict, as_float
from lockstep.record.program import REPLAYABLE, select_variables
from lockstep.record.reader import Run
from lockstep.record.run_environment import describe_environment, find_environment_differences
from lockstep.redaction import MARK
from lockstep.tools.recipes import NAMES

__all__ = ["Base", "Program", "find_base", "find_obstacles", "read_program"]

NOT_STORED = {
    "notebook": "a notebook, whose cells are not stored",
    "command": "`python -c` or an interactive interpreter, whose code is not stored",
    "driver": "the workers of a driver, whose calls are not stored",
}
"""The kinds of programs that cannot run again, in words."""


@dataclass(frozen=True)
class Program:
    """The program of a recorded run.

    Attributes:
        kind: "script", "module", "function" (a script that calls `ls.launch`) or "recipe".
        target: The script, the module or the recipe.
        arguments: Its arguments.
        cwd: The working directory.
        path: The entries of `sys.path` that do not belong to the installation; None if they
            are not known.
        environ: The environment variables that can change the bits of a result.
        variables: The environment variables that the program's own files name.
        torch_seed: The seed of torch's default generator, from which initial weights are drawn;
            None if it is not known.
        options: The options of a recipe.
        trainer: The index of the recorded trainer in the program, from 0. If `launch` is known,
            the index in the launched function.
        launch: The index of the call of `ls.launch`, from 0; None outside of such a call.
        sources: The folder with the stored sources; None if there are none.
    """

    kind: str
    target: str
    arguments: tuple[str, ...] = ()
    cwd: str = "."
    path: tuple[str, ...] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    torch_seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    trainer: int = 0
    launch: int | None = None
    sources: Path | None = None


@dataclass(frozen=True)
class Base:
    """The state from which a replay begins.

    Attributes:
        steps: The number of steps that are finished in this state.
        checkpoint: The checkpoint; None for the beginning of the program.
        remarks: Sentences about checkpoints that cannot be used.
    """

    steps: int = 0
    checkpoint: Path | None = None
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the state in words."""
        if self.checkpoint is None:
            return "the beginning"
        return f"the checkpoint after {self.steps} steps"


def read_program(run: Run, step: int) -> Program:
    """Return the program that computed a step of a run.

    Raises:
        UsageError: The record does not say what ran, or it cannot run again.
    """
    program = as_dict(run.latest("program", step))
    if not program:
        raise UsageError(
            f"{run.folder} does not say which program it ran, so no step can be replayed"
        )
    kind = str(program.get("kind"))
    target = str(program.get("target"))
    environ = {str(name): str(value) for name, value in as_dict(program.get("environ")).items()}
    threads = as_dict(run.latest("layout", step)).get("threads")
    if isinstance(threads, int):
        environ.setdefault("OMP_NUM_THREADS", str(threads))
    is_portable = as_dict(run.latest("environment", step)).get("portable")
    environ = (OF_TORCH if is_portable else {PORTABLE: "0"}) | environ
    given = program.get("arguments")
    arguments = tuple(map(str, given)) if isinstance(given, (list, tuple)) else ()
    where = f"{run.folder} was recorded by"
    kind = "notebook" if "ipykernel" in target else kind
    if kind in NOT_STORED:
        raise UsageError(
            f"{where} {NOT_STORED[kind]}, so it cannot be replayed: train in a script to replay "
            "its steps"
        )
    if kind not in REPLAYABLE or (kind == "recipe" and target not in NAMES):
        raise UsageError(
            f"{where} a {kind}, which this version of lockstep cannot run again: use the version "
            "that recorded it"
        )
    if any(MARK in text for text in (target, *arguments)):
        raise UsageError(
            f"the command of {run.folder} contained a secret, which is not stored, so it cannot be "
            "replayed"
        )
    trainer = run.latest("trainer", step)
    torch_seed = run.latest("torch_seed", step)
    path = program.get("path")
    launch = program.get("launch")
    return Program(
        kind,
        target,
        arguments,
        cwd=str(program.get("cwd") or os.getcwd()),
        path=tuple(map(str, path)) if isinstance(path, list) else None,
        environ=environ,
        torch_seed=torch_seed if isinstance(torch_seed, int) else None,
        variables=_read_variables(run, step),
        options=as_dict(run.latest("options", step)),
        trainer=trainer if isinstance(trainer, int) else 0,
        launch=launch if isinstance(launch, int) else 0 if kind == "function" else None,
        sources=run.find_stored_sources(step),
    )


def _read_variables(run: Run, step: int) -> dict[str, str]:
    """Return the variables that the program's files name, with those of modules imported late."""
    variables = {**as_dict(run.latest("variables", step))}
    for line in (*run.checkpoints, run.end or {}):
        variables |= as_dict(line.get("variables"))
    return {str(name): str(value) for name, value in variables.items()}


def find_base(run: Run, step: int) -> Base:
    """Return the newest valid checkpoint of a run at or before a step, else the beginning."""
    checkpoints = {
        int(path.name.split("-")[1]): path for path in find_checkpoints(run.folder / CHECKPOINTS)
    }
    # Checkpoints elsewhere, such as the one of another run from which this run began.
    for line in (*run.checkpoints, *run.resumes):
        recorded = line.get("path") or line.get("checkpoint")
        steps = line.get("step")
        if not isinstance(recorded, str) or not isinstance(steps, int):
            continue
        if (Path(recorded) / MANIFEST).is_file():
            checkpoints.setdefault(steps, Path(recorded))
    remarks: list[str] = []
    for steps, path in sorted(checkpoints.items(), reverse=True):
        problem = verify(path) if steps <= step else ""
        if problem:
            remarks.append(
                f"the checkpoint {path} is damaged: {problem}; the one before it is used"
            )
        elif steps <= step:
            return Base(steps, path.absolute(), tuple(remarks))
    return Base(remarks=tuple(remarks))


def find_obstacles(run: Run, step: int, program: Program, base: Base) -> list[str]:
    """Return sentences about why a replay may compute other bits than the run, or take longer."""
    obstacles = list(base.remarks)
    if not os.path.isdir(program.cwd):
        obstacles.append(f"the working directory {program.cwd} is not here: {os.getcwd()} is used")
    resumes = run.resumes[: run.segment(step)]
    if resumes and base.steps < as_float(resumes[-1].get("step")):
        number = resumes[-1]["step"]
        obstacles.append(
            f"the run was resumed after step {number}, from a checkpoint that is gone: the steps "
            f"from {base.steps} on are computed as the resumed program would have"
        )
    recorded = as_dict(run.latest("environment", step))
    here = describe_environment()
    if recorded.get("portable"):  # which the ranks verify
        here |= {name: recorded.get(name) for name in ("arithmetic", "portable", "instructions")}
    elif _choose_kernels(program.environ) != _choose_kernels(os.environ):
        del here["arithmetic"], here["instructions"]
    obstacles += find_environment_differences(recorded, here)
    if program.kind == "recipe":
        return obstacles
    if program.sources is None:
        obstacles.append("the sources of the run are not stored: today's files are run")
    return obstacles


def _choose_kernels(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which torch and its libraries choose kernels."""
    return {
        name: value
        for name, value in select_variables(environ).items()
        if name.startswith(("ATEN_", "DNNL_", "MKL_", "ONEDNN_"))
    }
