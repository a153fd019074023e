"""Builds: compiled by torch in a temporary folder, verified, then published under their names.

`torch.utils.cpp_extension` calls the compiler through ninja, in a process of its own, which is
ended together with the compilers. torch's headers take most of the time, so the files that include
them are two units: bind.cpp, which also reads the headers of pybind11, and all others.

setup.py imports this module: it needs torch and the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.comm.native.binding_folder import replace_folder, temporary_folder, write_abi
from lockstep.comm.native.extension_abi import CSRC, FLAGS, ExtensionABI, list_sources
from lockstep.foreign_messages import COMPILER_ERRORS

__all__ = ["CompilationError", "build_binding", "find_compiler", "find_requirements"]

MODULE = "_native.so"

PROGRAM = """
import json, sys
from torch.utils.cpp_extension import load
load(**json.loads(sys.argv[1]), verbose=True)
"""
STEP = re.compile(r"\[(\d+)/(\d+)\] ")  # ninja prints this and the command when one is done

TIMEOUT = 3600.0  # seconds for all of it; a loaded machine needs minutes


INSTALL_COMPILER = "install g++ (Debian, Ubuntu: apt install g++), or set CXX to a C++20 compiler"


class CompilationError(Exception):
    """The extension could not be compiled.

    Args:
        reason: Why, as one sentence; the message of the error.
        advice: What the user can do about it.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


def build_binding(
    folder: Path,
    abi: ExtensionABI,
    log: Path,
    show_progress: Callable[[int, int], None],
    verify: Callable[[Path], None] = lambda module: None,
) -> Path:
    """Compile the extension for the installed torch into a folder of bindings.

    Args:
        folder: An existing folder; the caller holds its lock.
        abi: The ABI of this process.
        log: File for the compiler's commands and their output.
        show_progress: Called with the number of commands that are done, and of all.
        verify: Called with the module before it is published; raises if it does not work.

    Returns:
        The published module.

    Raises:
        CompilationError: There is no compiler, or it failed.
        OSError: The folder cannot be written.
    """
    with temporary_folder(folder) as work:
        compile_extension(work, log, show_progress)
        complete = work / "complete"
        complete.mkdir(mode=folder.stat().st_mode & 0o777)
        (work / MODULE).rename(complete / MODULE)
        (complete / MODULE).chmod(0o755 & folder.stat().st_mode)
        write_abi(complete, abi)
        verify(complete / MODULE)
        replace_folder(complete, folder / abi.name)
    return folder / abi.name / MODULE


def compile_extension(folder: Path, log: Path, show_progress: Callable[[int, int], None]) -> None:
    """Compile the extension into FOLDER/_native.so; see `build_binding`."""
    compiler = find_requirements()
    environment = {
        "MAX_JOBS": str(len(os.sched_getaffinity(0))),
        **os.environ,
        "CXX": shlex.join(compiler),
        "PATH": _search_path(),  # of ninja, also if the virtual environment is not activated
        "LC_ALL": "C",  # for `COMPILER_ERRORS`
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # it warns of every compiler not named g++
    }
    options = {
        "name": "_native",
        "sources": [_write_unit(folder), *_list_units()],
        "extra_cflags": FLAGS,
        # Without the last one, a compiler that links libstdc++ statically gives the module a copy
        # of it that is mixed with that of torch: the first number in a stream crashes.
        "extra_ldflags": ["-pthread", "-Wl,-s", "-Wl,--exclude-libs,ALL"],
        "extra_include_paths": [str(CSRC / "core"), str(CSRC / "binding")],
        "build_directory": str(folder),
        "with_cuda": False,
    }
    log.unlink(missing_ok=True)
    with (
        open(log, "w+", encoding="utf-8") as output,
        subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # ended together with ninja and the compilers
        ) as process,
    ):
        assert process.stdout is not None
        timer = threading.Timer(TIMEOUT, _terminate, [process])
        timer.start()
        try:
            for line in process.stdout:
                output.write(line)
                if step := STEP.match(line):
                    show_progress(int(step[1]), int(step[2]))
            status = process.wait()
        finally:
            timer.cancel()
            _terminate(process)
            process.stdout.read()  # until ninja and the compilers have ended
        output.seek(0)
        if status or not (folder / MODULE).exists():
            reason = f"{compiler[0]}: {_find_error(output.read(), status)}"
            advice = "the compiler must know C++20; set CXX to use another one"
            raise CompilationError(reason, advice)


def _write_unit(folder: Path) -> str:
    """Write the unit that includes all files with torch's headers except for bind.cpp."""
    unit = folder / "binding.cpp"
    sources = [path for path in list_sources(CSRC / "binding", ".cpp") if "bind.cpp" not in path]
    unit.write_text("".join(f'#include "{path}"\n' for path in sources))
    return str(unit)


def _list_units() -> list[str]:
    return [str(CSRC / "binding" / "bind.cpp"), *list_sources(CSRC / "core", ".cpp")]


def find_compiler(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the C++ compiler: the value of CXX, else c++, g++ or clang++.

    Raises:
        CompilationError: There is none.
    """
    requested = shlex.split(environment.get("CXX", ""))
    if requested:
        if shutil.which(requested[0], path=environment.get("PATH")) is None:
            reason = f"the compiler {requested[0]} (from CXX) was not found"
            raise CompilationError(reason, INSTALL_COMPILER)
        return tuple(requested)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name, path=environment.get("PATH")) is not None:
            return (name,)
    raise CompilationError("there is no C++ compiler", INSTALL_COMPILER)


def find_requirements() -> tuple[str, ...]:
    """Return the C++ compiler.

    Raises:
        CompilationError: The compiler, or something else that a build needs, is missing.
    """
    compiler = find_compiler()
    include = sysconfig.get_path("include")
    if not list_sources(CSRC, ".cpp"):
        raise CompilationError(f"the C++ sources are missing in {CSRC}", "reinstall torch-lockstep")
    if not Path(include, "Python.h").is_file():
        reason = f"the headers of Python are missing (no Python.h in {include})"
        advice = "install Python's headers (Debian, Ubuntu: apt install python3-dev)"
        raise CompilationError(reason, advice)
    if shutil.which("ninja", path=_search_path()) is None:
        advice = "install it (it is a dependency of torch-lockstep)"
        raise CompilationError("there is no ninja (pip install ninja)", advice)
    return compiler


def _search_path() -> str:
    return os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))


def _terminate(process: subprocess.Popen[str]) -> None:
    """End a process that still runs; ninja ends its compilers, which are groups of their own."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


def _find_error(output: str, status: int) -> str:
    """Return the line of the compiler's or torch's output that says what failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if any(words in line for words in COMPILER_ERRORS):
            return line
    if status == -signal.SIGTERM:
        return f"terminated, or not done after {TIMEOUT:g} s"
    return lines[-1] if lines else f"exit status {status}"
