"""The program of a recorded run: what it was, and how it can run again.

    record.jsonl, launch.json, checkpoints ──> Program, Base ──> ranks

Everything here only reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoint.folder import FOLDER, find_checkpoints, verify
from lockstep.errors import UsageError
from lockstep.launcher.run_folder import read_description
from lockstep.record.columns import as_dict
from lockstep.record.reader import Run

__all__ = ["Base", "Program", "find_base", "read_program"]

DECIDING = ("ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "PYTHONHASHSEED")
DECIDING_PREFIXES = ("DNNL_", "MKL_", "ONEDNN_")


@dataclass(frozen=True)
class Program:
    """What ran.

    Attributes:
        kind: "script", "module" or "recipe".
        target: The script, the module or the recipe.
        arguments: Its arguments.
        cwd: The working directory.
        path: The entries of `sys.path` that do not belong to the installation; None where
            they are not known.
        environ: The variables that decide bits.
        options: The options of a recipe.
        trainer: The number of the recorded trainer in the program, from 0.
        sources: The folder with the stored sources; None where there are none.
    """

    kind: str
    target: str
    arguments: tuple[str, ...] = ()
    cwd: str = "."
    path: tuple[str, ...] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    trainer: int = 0
    sources: Path | None = None


@dataclass(frozen=True)
class Base:
    """Where a replay begins.

    Attributes:
        steps: The number of steps that are finished there.
        checkpoint: The checkpoint; None for the beginning of the program.
        remarks: Which checkpoints cannot be used and why, in sentences.
    """

    steps: int = 0
    checkpoint: Path | None = None
    remarks: tuple[str, ...] = ()


def read_program(run: Run, step: int) -> Program:
    """Return the program that computed a step of a run.

    Raises:
        UsageError: The record does not say what ran, or it cannot run again.
    """
    options = as_dict(_latest(run, step, "options"))
    variables = as_dict(as_dict(_latest(run, step, "environment")).get("variables"))
    environ = {name: str(value) for name, value in variables.items() if is_deciding(name)}
    threads = as_dict(_latest(run, step, "layout")).get("threads")
    if isinstance(threads, int):
        environ.setdefault("OMP_NUM_THREADS", str(threads))
    if "recipe" in options:
        recipe = str(options["recipe"])
        return Program("recipe", recipe, cwd=os.getcwd(), environ=environ, options=options)
    launched = read_description(run.folder)
    if launched is None:
        raise UsageError(
            f"{run.folder} does not say which program it ran, so no step can be replayed; record "
            "the run again with this version of lockstep"
        )
    if launched.kind == "program":
        raise UsageError(
            f"{run.folder} ran {launched.target} with --no-python, and only Python programs can be "
            "replayed"
        )
    if launched.is_redacted:
        raise UsageError(
            f"the command of {run.folder} contained a secret, which is not stored, so it cannot be "
            "replayed"
        )
    return Program(
        launched.kind, launched.target, launched.arguments, launched.cwd, environ=environ
    )


def is_deciding(name: str) -> bool:
    """Return whether a variable can change the bits of a training."""
    return name in DECIDING or name.startswith(DECIDING_PREFIXES)


def find_base(run: Run, step: int) -> Base:
    """Return the newest valid checkpoint of a run at or before a step, else the beginning."""
    folders = {run.folder / FOLDER}
    for line in (*run.checkpoints, *run.resumes):
        recorded = line.get("path") or line.get("checkpoint")
        if isinstance(recorded, str):
            folders.add(Path(recorded).parent)
    found: dict[int, Path] = {}
    for folder in sorted(folders):
        for path in find_checkpoints(folder):
            steps = int(path.name.split("-")[1])
            if steps <= step:
                found.setdefault(steps, path)
    remarks: list[str] = []
    for steps, path in sorted(found.items(), reverse=True):
        problem = verify(path)
        if not problem:
            return Base(steps, path, tuple(remarks))
        remarks.append(f"the checkpoint {path} is damaged: {problem}; the one before it is used")
    return Base(remarks=tuple(remarks))


def _latest(run: Run, step: int, name: str) -> Any:
    """Return a field as it was when a step was taken: of the last resumption before, or first."""
    lines = (*reversed(run.resumes[: run.segment(step)]), run.header)
    return next((line[name] for line in lines if line.get(name) is not None), None)
