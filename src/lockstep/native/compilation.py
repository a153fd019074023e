"""The core and the binding, compiled by the commands that a plan lists.

    core      C++ without torch, compiled into libcore.a; fits any torch
    binding   the files that include torch, in two units, linked with the core into one module

torch's headers take most of the time. Each unit reads them once, so two units keep two cores
busy. Only the unit with bind.cpp reads the headers of pybind11.

setup.py imports this module: it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

__all__ = [
    "ARCHIVE",
    "CSRC",
    "FLAGS",
    "MODULE",
    "Command",
    "CompilationError",
    "TorchBuild",
    "compile_native",
    "describe_compiler",
    "find_compiler",
    "list_sources",
    "plan_archive",
    "plan_binding",
    "plan_core",
    "plan_link",
]

CSRC = Path(__file__).parent.parent / "csrc"

ARCHIVE = "libcore.a"
MODULE = "_native" + str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")

# No fused multiply-add: all processors must compute the same bits. Signed integers wrap.
FLAGS = (
    "-std=c++20", "-O3", "-DNDEBUG", "-fwrapv", "-ffp-contract=off",
    "-fPIC", "-pthread", "-fvisibility=hidden", "-g0",
)  # fmt: skip
LIBRARIES = ("c10", "torch_cpu", "torch_python")

VERSION_TIMEOUT = 30.0  # seconds
TIMEOUT = 1800.0  # seconds for one call of the compiler; a loaded machine needs minutes


class CompilationError(Exception):
    """The core or the binding could not be compiled; the message is one sentence without advice."""


@dataclass(frozen=True)
class Command:
    """One call of the compiler.

    Attributes:
        part: The part that it compiles: "core" or "binding".
        arguments: The program and its arguments.
        output: The file that it creates.
    """

    part: str
    arguments: tuple[str, ...]
    output: Path


@dataclass(frozen=True)
class TorchBuild:
    """The torch that a binding is compiled for.

    Attributes:
        folder: The folder of the package `torch`, with include/ and lib/.
        cxx_abi: 1 if it was built with the C++11 ABI of libstdc++, else 0.
    """

    folder: Path
    cxx_abi: int = 1


# --- the plan ------------------------------------------------------------------------------


def list_sources(folder: Path, *suffixes: str) -> list[str]:
    """Return the paths of the files below a folder with one of the suffixes, sorted."""
    found = [os.path.join(each, name) for each, _, names in os.walk(folder) for name in names]
    return sorted(path for path in found if path.endswith(suffixes))


def plan_core(
    compiler: Sequence[str], sources: Sequence[Path], folder: Path, cxx_abi: int = 1
) -> list[Command]:
    """Return the commands that compile the core's sources into objects in a folder."""
    flags = [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={cxx_abi}"]
    commands = []
    for source in sources:
        output = folder / f"{source.parent.name}-{source.stem}.o"
        arguments = [*compiler, *flags, "-c", str(source), "-o", str(output)]
        commands.append(Command("core", tuple(arguments), output))
    return commands


def plan_archive(archiver: Sequence[str], objects: Sequence[Path], output: Path) -> Command:
    """Return the command that collects the core's objects in an archive."""
    return Command("core", (*archiver, "rcs", str(output), *map(str, objects)), output)


def plan_binding(
    compiler: Sequence[str],
    sources: Sequence[Path],
    core: Path,
    torch: TorchBuild,
    python_include: str,
    folder: Path,
) -> list[Command]:
    """Return the commands that compile the binding's two units into objects in a folder.

    Args:
        compiler: The compiler, which may be followed by arguments.
        sources: All files of the binding; bind.cpp is one unit, the others are the second.
        core: Folder of the core's headers.
        torch: The torch to compile for.
        python_include: Folder of Python.h.
        folder: Where the objects are written.
    """
    flags = [
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={torch.cxx_abi}",
        "-DTORCH_EXTENSION_NAME=_native",
        f"-I{core}",
        *("-isystem", str(torch.folder / "include")),
        *("-isystem", python_include),
    ]
    units = {
        "bind": [path for path in sources if path.stem == "bind"],
        "backend": [path for path in sources if path.stem != "bind"],
    }
    commands = []
    for name, (*included, last) in units.items():
        output = folder / f"{name}.o"
        before = [argument for path in included for argument in ("-include", str(path))]
        arguments = [*compiler, *flags, *before, "-c", str(last), "-o", str(output)]
        commands.append(Command("binding", tuple(arguments), output))
    return commands


def plan_link(
    compiler: Sequence[str], objects: Sequence[Path], archive: Path, torch: TorchBuild, output: Path
) -> Command:
    """Return the command that links the binding with the core and with torch's libraries.

    The module contains no path to torch's libraries: they are loaded before it is imported.
    """
    arguments = [
        *compiler,
        *("-shared", "-pthread", "-Wl,-s", "-o", str(output)),
        *map(str, objects),
        str(archive),
        f"-L{torch.folder / 'lib'}",
        *(f"-l{name}" for name in LIBRARIES),
    ]
    return Command("binding", tuple(arguments), output)


# --- the execution -------------------------------------------------------------------------


def find_compiler(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the C++ compiler: the value of CXX, else c++, g++ or clang++.

    Raises:
        CompilationError: There is none.
    """
    requested = shlex.split(environment.get("CXX", ""))
    if requested:
        if shutil.which(requested[0], path=environment.get("PATH")) is None:
            raise CompilationError(f"the compiler {requested[0]} (from CXX) was not found")
        return tuple(requested)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name, path=environment.get("PATH")) is not None:
            return (name,)
    raise CompilationError("there is no C++ compiler")


def describe_compiler(compiler: Sequence[str]) -> str:
    """Return the first line of the compiler's version output.

    Raises:
        CompilationError: The compiler cannot be started.
    """
    try:
        done = subprocess.run(
            [*compiler, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilationError(f"the compiler {compiler[0]} cannot be started: {error}") from None
    return (done.stdout or done.stderr).partition("\n")[0]


def compile_native(
    folder: Path,
    log: Path,
    torch: TorchBuild | None,
    archive: Path | None,
    show_progress: Callable[[str, int, int], None],
    cxx_abi: int = 1,
) -> None:
    """Compile the core into FOLDER/libcore.a and the binding into FOLDER/_native*.so.

    Args:
        folder: An existing, empty folder.
        log: File for the compiler's commands and their output.
        torch: The torch to compile a binding for; None compiles the core only.
        archive: The compiled core; None to compile it.
        show_progress: Called with the part ("core" or "binding"), the number of its files that
            are compiled, and the number of all its files.
        cxx_abi: The C++ ABI of the core if `torch` is None.

    Raises:
        CompilationError: There is no compiler, or it failed.
    """
    compiler = find_compiler()
    archiver = shlex.split(os.environ.get("AR", "")) or ["ar"]
    _check_headers(torch)
    core: list[Command] = []
    binding: list[Command] = []
    if torch is not None:
        binding = plan_binding(
            compiler,
            [Path(path) for path in list_sources(CSRC / "binding", ".cpp")],
            CSRC / "core",
            torch,
            sysconfig.get_path("include"),
            folder,
        )
    if archive is None:
        sources = [Path(path) for path in list_sources(CSRC / "core", ".cpp")]
        sources.sort(key=os.path.getsize, reverse=True)  # the longest jobs start first
        core = plan_core(compiler, sources, folder, torch.cxx_abi if torch else cxx_abi)
    with _Execution(log, show_progress) as execution:
        execution.run([*binding, *core])
        if archive is None:
            archive = folder / ARCHIVE
            execution.run([plan_archive(archiver, [each.output for each in core], archive)])
        if torch is not None:
            objects = [each.output for each in binding]
            execution.run([plan_link(compiler, objects, archive, torch, folder / MODULE)])


def _check_headers(torch: TorchBuild | None) -> None:
    if not list_sources(CSRC, ".cpp"):
        raise CompilationError(f"the C++ sources are missing in {CSRC}")
    if torch is None:
        return
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        raise CompilationError(f"the headers of Python are missing (no Python.h in {include})")
    if not (torch.folder / "include" / "torch").is_dir():
        raise CompilationError(f"the headers of torch are missing (no include in {torch.folder})")


class _Execution:
    """Commands that run in parallel, one per usable core, until one fails.

    Args:
        log: File for every command and its output.
        show_progress: See `compile_native`.
    """

    def __init__(self, log: Path, show_progress: Callable[[str, int, int], None]) -> None:
        self._log_path, self._show_progress = log, show_progress
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = threading.Event()

    def __enter__(self) -> _Execution:
        self._log_path.unlink(missing_ok=True)
        self._log = open(self._log_path, "w", encoding="utf-8")
        return self

    def __exit__(self, *_error: object) -> None:
        self._log.close()

    def run(self, commands: Sequence[Command]) -> None:
        """Run commands that do not depend on one another.

        Raises:
            CompilationError: A command failed; the others have been ended.
        """
        total = {part: sum(each.part == part for each in commands) for part in ("core", "binding")}
        done = dict.fromkeys(total, 0)
        for part in {command.part: None for command in commands}:
            self._show_progress(part, 0, total[part])
        with ThreadPoolExecutor(_count_cores()) as pool:
            # A Ctrl-C inside `concurrent.futures.wait` may leave the lock of a future held.
            finished: SimpleQueue[Future[None]] = SimpleQueue()
            pending = {pool.submit(self._run_one, command): command for command in commands}
            for each in pending:
                each.add_done_callback(finished.put)
            try:
                for _ in commands:
                    each = finished.get()
                    part = pending[each].part
                    each.result()
                    done[part] += 1
                    self._show_progress(part, done[part], total[part])
            except BaseException:
                self._stop()
                pool.shutdown(cancel_futures=True)
                raise

    def _run_one(self, command: Command) -> None:
        environment = {**os.environ, "LC_ALL": "C"}  # `_first_error` looks for "error"
        with self._lock:
            if self._stopped.is_set():
                return
            try:
                process = subprocess.Popen(
                    command.arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    env=environment,
                    start_new_session=True,  # ended together with the processes that it starts
                )
            except OSError as error:
                raise CompilationError(
                    f"{command.arguments[0]} cannot be started: {error.strerror}"
                ) from None
            self._running.add(process)
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise CompilationError(
                f"{command.arguments[0]} has not compiled {command.output.name} within "
                f"{TIMEOUT:g} s"
            ) from None
        finally:
            _kill(process)
            with self._lock:
                self._running.discard(process)
        with self._lock:
            if self._stopped.is_set():
                return
            print(f"$ {shlex.join(command.arguments)}\n{output}", file=self._log, flush=True)
        if process.returncode or not command.output.exists():
            raise CompilationError(_first_error(command, process.returncode, output))

    def _stop(self) -> None:
        with self._lock:
            self._stopped.set()
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process that still runs, and the processes that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _first_error(command: Command, status: int, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if "error:" in line or "cannot find" in line:
            return f"{command.arguments[0]}: {line}"
    end = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
    return f"{command.arguments[0]}: {lines[-1] if lines else end}"


def _count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
