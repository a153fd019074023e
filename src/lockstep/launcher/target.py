"""The target of a launch: where its source is, and whether it can be started at all."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from lockstep.kernel.errors import UsageError

__all__ = ["check_target", "check_working_directory"]


def check_target(kind: str, target: str) -> None:
    """Check a target before anything starts, so that errors are not reported by every rank.

    Args:
        kind: "script", "module" or "program".
        target: The script, module or program.

    Raises:
        UsageError: There is no such script, module or program, or it is not valid Python.
    """
    if kind == "script":
        _check_script(target)
    elif kind == "module":
        _find_module(target)
    elif shutil.which(target) is None:
        raise UsageError(f"{target!r} is not an executable program")


def _find_module(target: str) -> ModuleSpec:
    """Find a module, or a package's `__main__`, as an import does but without running code."""
    folders = [os.getcwd(), *sys.path]
    name = ""
    for part in target.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            raise UsageError(f"there is no module {name!r} (searched from {os.getcwd()})")
        folders = list(spec.submodule_search_locations or ())
    if folders and (spec := PathFinder.find_spec(f"{name}.__main__", folders)) is None:
        raise UsageError(f"{name!r} is a package without a __main__ module")
    assert spec is not None, "the name of a module has parts"
    return spec


def _check_script(target: str) -> None:
    path = Path(target)
    if not path.exists():
        raise UsageError(f"there is no script {target!r} in {os.getcwd()}")
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise UsageError(f"{target!r} is a folder without a __main__.py")
        return
    try:
        compile(path.read_bytes(), target, "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"{target!r} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{target}{line} is not valid Python: {said}") from None


def check_working_directory() -> None:
    """Raise UsageError if this process's working directory has been deleted.

    Ranks could not enter it, and Intel MKL ends a process that loads torch there.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "the working directory has been deleted: change to another one (cd) and try again"
        ) from None
