"""The description of a run's program, from which it can be run again.

program     kind        script, module, function (of `ls.launch`), recipe, command (-c), notebook,
                        driver (whose calls a worker executes)
            launch      the number of the call of `ls.launch`, for a function
            target      the script's `__file__`, or the name of the module or recipe
            arguments, cwd, path (entries of sys.path outside of installations)
            environ     the variables that affect the bits of the results
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

from lockstep.launcher.rank_process import get_launch_number, get_task
from lockstep.launcher.run_folder import find_description, find_launch_folder
from lockstep.launcher.tracebacks import find_ipython_shell
from lockstep.user_code import INSTALLED, PACKAGE

__all__ = [
    "REPLAYABLE",
    "describe_program",
    "find_started_folder",
    "select_variables",
]

# Variables that affect the bits of the results: threads, instruction sets and algorithms.
PREFIXES = ("DNNL_", "MKL_", "ONEDNN_", "OPENBLAS_", "TORCHDYNAMO_", "TORCHINDUCTOR_")
NAMES = {
    "ATEN_CPU_CAPABILITY", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG",
    "LOCKSTEP_PORTABLE", "NPY_DISABLE_CPU_FEATURES",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "PYTHONHASHSEED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_COMPILE_DISABLE",
}  # fmt: skip
REPLAYABLE = ("script", "module", "function", "recipe")
"""The kinds of programs that can run again from their descriptions."""

INSTALLATION = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


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
        "path": [os.path.abspath(entry) for entry in sys.path if not _is_installed(entry)],
        "environ": {name: value for name, value in environ.items() if name not in own},
    }


def find_started_folder() -> str:
    """Return the working directory in which the program was started; the current one if unknown."""
    folder = find_launch_folder()
    launched = None if folder is None else find_description(folder)
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
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    if find_ipython_shell() is not None:
        return "notebook", ""
    if "lockstep.tools.remote.worker" in sys.modules:
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
        path == os.path.dirname(PACKAGE)
        or is_archive
        or path.startswith(INSTALLATION)
        or any(part in f"{path}/" for part in INSTALLED)
    )
