"""`lockstep build`: compile the backend "lockstep" for the torch that is installed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import click

from lockstep.files import remove_tree
from lockstep.formatting import format_bytes, format_duration
from lockstep.kernel.errors import FileError, UsageError, WorkError
from lockstep.messages import say
from lockstep.native.binding import BindingError, find_bindings
from lockstep.native.binding_folder import (
    get_cache_folder,
    lock_folder,
    measure_folder,
    reason_not_trusted,
)
from lockstep.native.binding_key import BindingKey, current_key
from lockstep.native.build import build_binding
from lockstep.native.compilation import CompilationError
from lockstep.native.self_test import SelfTestError, run_self_test

__all__ = ["command"]

LOCK_TIMEOUT = 3600.0  # seconds to wait for another build
LOG = "build.log"

WORDS = {"core": "files", "binding": "units"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--clean", is_flag=True, help="Remove all bindings from the cache instead of building one."
)
@click.option("--verbose", is_flag=True, help="Print the compiler's output if it fails.")
def command(clean: bool, verbose: bool) -> None:
    """Compile the backend 'lockstep' for the installed torch.

    Needs a C++20 compiler: the value of CXX, else c++, g++ or clang++. Takes about one minute of
    processor time, on all cores together, and two if the installation has not compiled the core.
    Two ranks test the result before it is used. It is kept in
    $XDG_CACHE_HOME/lockstep/bindings (default: ~/.cache/lockstep/bindings), one for each torch,
    Python and version of Lockstep. If there is one that works already, nothing is compiled.

    Exit status: 0 the backend can be used (or the cache is removed), 1 the compiler or the test
    failed, 2 usage error.
    """
    if sys.platform != "linux":
        raise UsageError(f"build: the backend 'lockstep' needs Linux, and this is {sys.platform}")
    cache = get_cache_folder()
    previous = signal.signal(signal.SIGTERM, _exit_on_signal)  # also ends the compilers
    try:
        for folder in (cache.parent, cache):
            reason = reason_not_trusted(folder)
            if reason is not None:
                raise FileError(
                    f"build: the cache is not used, because {reason}: correct that or set "
                    f"XDG_CACHE_HOME to a folder of user {os.geteuid()}"
                )
        if clean:
            _clean(cache)
        else:
            _build(cache, verbose)
    except TimeoutError as error:
        raise WorkError(f"build: {error} for {LOCK_TIMEOUT:g} s: end that process") from None
    except OSError as error:
        raise FileError(
            f"build: {error.filename or cache} cannot be written ({error.strerror}): correct that "
            "or set XDG_CACHE_HOME to another folder"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def _clean(cache: Path) -> None:
    if not cache.exists():
        say(f"there are no bindings in {cache}")
        return
    with lock_folder(cache, LOCK_TIMEOUT, _say_waiting):
        size = measure_folder(cache)
        remove_tree(cache)
    if cache.exists():
        raise FileError(f"build: {cache} could not be removed completely: look at its permissions")
    with contextlib.suppress(OSError):  # the folder may hold other files of Lockstep
        cache.parent.rmdir()
    say(f"removed {cache} ({format_bytes(size)})")


def _build(cache: Path, verbose: bool) -> None:
    try:
        key = current_key()
    except ImportError as error:
        raise UsageError(f"build: torch cannot be imported ({error}): install it first") from None
    found, _ = _find_working()
    if found is None:
        with lock_folder(cache, LOCK_TIMEOUT, _say_waiting):
            found, reason = _find_working()  # the build that this one waited for may suffice
            if reason is not None:
                say(f"{reason}: building it again")
            if found is None:
                begin = time.monotonic()
                module = _compile(cache, key, verbose)
                size = format_bytes(module.stat().st_size)
                seconds = format_duration(time.monotonic() - begin)
                say(f"built for torch {key.torch} in {seconds}, and tested: {module} ({size})")
                return
    say(
        f"nothing to build: {found} ({format_bytes(found.stat().st_size)}) was built for torch "
        f"{key.torch}, and it works"
    )


def _find_working() -> tuple[Path | None, str | None]:
    """Return the module that this process would load, or the reason why it does not work."""
    try:
        found = find_bindings()[0]
    except BindingError:
        return None, None
    try:
        run_self_test(found)
    except SelfTestError as error:
        return None, f"{found} fits this torch but does not work ({error})"
    return found, None


def _compile(cache: Path, key: BindingKey, verbose: bool) -> Path:
    progress = _Progress()
    log = cache / LOG
    try:
        return build_binding(cache, key, log, progress.show, progress.verify)
    except CompilationError as error:
        progress.close()
        if verbose and log.exists():
            click.echo(log.read_text(errors="replace"), err=True)
        what = f" (all output: {log})" if log.exists() else ""
        raise WorkError(f"build: {error}{what}: {_advise(str(error))}") from None
    except SelfTestError as error:
        progress.close()
        raise WorkError(
            f"build: the new binding does not work ({error}), so it is not used: set CXX to "
            f"another compiler, or report it with {log}"
        ) from None
    finally:
        progress.close()


def _advise(error: str) -> str:
    if "no C++ compiler" in error or "CXX" in error:
        return "install g++ (Debian, Ubuntu: apt install g++), or set CXX to a C++20 compiler"
    if "Python.h" in error:
        return "install Python's headers (Debian, Ubuntu: apt install python3-dev)"
    if "are missing" in error:
        return "reinstall the package that they belong to"
    return "the compiler must know C++20; set CXX to use another one"


class _Progress:
    """The progress display: one changing line on a terminal, else one line per complete part."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._parts: dict[str, str] = {}

    def show(self, part: str, done: int, total: int) -> None:
        """Show how many files of a part are compiled."""
        if total == 1:  # an archive or a link is not worth a line
            return
        self._parts[part] = f"{part} {done} of {total} {WORDS[part]}"
        if self._is_terminal:
            self._draw(", ".join(self._parts[name] for name in sorted(self._parts)))
        elif done == total:
            click.echo(self._parts[part], err=True)

    def verify(self, module: Path) -> None:
        """Test the new binding, and show that the test runs."""
        if self._is_terminal:
            self._draw("testing with two ranks")
        else:
            click.echo("testing with two ranks", err=True)
        run_self_test(module)

    def close(self) -> None:
        """Remove the line."""
        if self._is_terminal:
            self._draw("")

    def _draw(self, text: str) -> None:
        click.echo(f"\r\033[K{text}", nl=False, err=True)


def _say_waiting(process: int) -> None:
    who = f"process {process}" if process else "another process"
    say(f"another build is running ({who}): waiting for it")


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
