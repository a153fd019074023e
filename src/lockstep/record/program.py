"""The description of a run's program, from which it can be run again, and of its data files.

program     kind        script, module, function (of `ls.launch`), recipe, command (-c), notebook,
                        driver (whose calls a worker executes)
            launch      the number of the call of `ls.launch`, for a function
            target      the script's `__file__`, or the name of the module or recipe
            arguments, cwd, path (entries of sys.path outside of installations)
            environ     the variables that affect the bits of the results
data        files and folders that a dataset names, with size and time of modification
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from lockstep.kernel.errors import UsageError
from lockstep.launcher.rank_process import get_launch_number, get_task
from lockstep.launcher.run_folder import find_launch_folder, read_description
from lockstep.launcher.stacks import INSTALLED
from lockstep.launcher.tracebacks import find_ipython_shell

__all__ = [
    "REPLAYABLE",
    "describe_data",
    "describe_program",
    "find_started_folder",
    "select_variables",
]

# Variables that affect the bits of the results: threads, instruction sets and algorithms.
PREFIXES = ("DNNL_", "MKL_", "ONEDNN_", "OPENBLAS_", "TORCHDYNAMO_", "TORCHINDUCTOR_")
NAMES = {
    "ATEN_CPU_CAPABILITY", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "PYTHONHASHSEED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_COMPILE_DISABLE",
}  # fmt: skip
REPLAYABLE = ("script", "module", "function", "recipe")
"""The kinds of programs that can run again from their descriptions."""

INSTALLATION = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MOST_PATHS = 100  # possible paths that are examined
MOST_OBJECTS = 2000  # objects that are examined, once per epoch
LONGEST = 4096  # characters of a path


def describe_program(kind: str | None = None, target: str | None = None) -> dict[str, Any]:
    """Return the description of this process's program, the field `program` of a record.

    Args:
        kind: "recipe" for a recipe. None: the kind of the process.
        target: The name of the recipe. None: the target of the process.
    """
    found_kind, found_target = _find_target()
    world: Any = sys.modules.get("lockstep.launcher.world")  # importing it would import torch
    own = () if world is None else world.variables_set()  # `ls.init` sets them again
    environ = select_variables(os.environ)
    return {
        "kind": kind or found_kind,
        **({"launch": get_launch_number()} if found_kind == "function" and kind is None else {}),
        "target": target or found_target,
        "arguments": sys.argv[1:],
        "cwd": find_started_folder(),
        "path": [os.path.abspath(each) for each in sys.path if not _is_installed(each)],
        "environ": {name: value for name, value in environ.items() if name not in own},
    }


def find_started_folder() -> str:
    """Return the working directory in which the program was started; the current one if unknown."""
    folder = find_launch_folder()
    try:
        launched = None if folder is None else read_description(folder)
    except UsageError:  # damaged
        launched = None
    return os.getcwd() if launched is None else launched.cwd


def select_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect the bits of the results."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(PREFIXES) or name in NAMES
    }


def _find_target() -> tuple[str, str]:
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if find_ipython_shell() is not None:
        return "notebook", ""
    if "lockstep.remote.worker" in sys.modules:
        return "driver", ""
    if get_task() == "function":
        return "function", sys.argv[0]
    if sys.argv[0] == "-c" or file is None or file == "<stdin>":
        return "command", ""
    if spec is None:
        return "script", file
    if spec.name == "__main__":  # a folder, or a zip file
        return "script", os.path.dirname(file)
    return "module", spec.name.removesuffix(".__main__")


def _is_installed(entry: str) -> bool:
    """Return whether an entry of sys.path belongs to an installation, not to the user."""
    path = os.path.abspath(entry)
    is_archive = path.endswith(".zip") and path.startswith(os.path.dirname(INSTALLATION[0]))
    return (
        path == PACKAGE_FOLDER
        or is_archive
        or path.startswith(INSTALLATION)
        or any(part in f"{path}/" for part in INSTALLED)
    )


# --- data ----------------------------------------------------------------------------------------


def describe_data(dataset: object) -> list[dict[str, Any]]:
    """Return the files and folders that a dataset names: path, size in bytes, mtime_ns.

    Paths are found in its attributes, in their lists, tuples and dicts, in nested datasets, and in
    memory-mapped arrays. A string without a separator counts only if it is the name of a file. At
    most 2,000 objects are examined, and 100 strings or paths, those with a separator first. Other
    files that the program reads are not known. The size of a folder is None.
    """
    found = {}
    for path in sorted(_named_paths(dataset), key=_is_word)[:MOST_PATHS]:
        absolute = os.path.abspath(path)
        try:
            status = os.stat(absolute)
        except (OSError, ValueError):
            continue
        is_folder = stat.S_ISDIR(status.st_mode)
        if is_folder and _is_word(path):
            continue
        size = None if is_folder else status.st_size
        found[absolute] = {"path": absolute, "size": size, "mtime_ns": status.st_mtime_ns}
    return list(found.values())


def _is_word(path: str | Path) -> bool:
    """Return whether a string may be a word such as "train", not a path."""
    return isinstance(path, str) and os.sep not in path


def _named_paths(dataset: object) -> Iterator[str | Path]:
    """Yield the strings and paths in a dataset and its attributes.

    Only lists, tuples and dicts are entered: another mapping may read a file for each entry.
    """
    waiting, seen = deque([dataset]), {id(dataset)}
    for _ in range(MOST_OBJECTS):
        if not waiting:
            return
        value = waiting.popleft()
        inside: Iterable[object] = ()
        if isinstance(value, (str, Path)):
            if value and len(str(value)) < LONGEST:
                yield value
        elif isinstance(value, np.memmap):
            if value.filename is not None:
                yield Path(os.fsdecode(value.filename))
        elif type(value) in (list, tuple):
            inside = islice(cast(Iterable[object], value), MOST_PATHS)
        elif type(value) is dict:
            inside = islice(value.values(), MOST_PATHS)
        elif not isinstance(value, type) and not callable(value):
            inside = list(getattr(value, "__dict__", {}).values())
        for each in inside:
            if id(each) not in seen:
                seen.add(id(each))
                waiting.append(each)
