"""`lockstep build`: compile the backend "lockstep" for the torch that is installed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from lockstep.comm.native.binding import BindingError, find_bindings
from lockstep.comm.native.binding_folder import (
    empty_folder,
    get_cache_folder,
    lock_folder,
    reason_not_trusted,
)
from lockstep.comm.native.build import CompilationError, build_binding
from lockstep.comm.native.extension_abi import ExtensionABI, current_abi
from lockstep.comm.native.self_test import SelfTestError, run_self_test
from lockstep.formatting import format_bytes, format_duration
from lockstep.kernel.errors import FileError, UsageError, WorkError
from lockstep.launcher.signals import exiting_on_sigterm
from lockstep.messages import log

__all__ = ["command"]

LOCK_TIMEOUT = 3600.0  # seconds to wait for another build
LOG = "build.log"


@click.command()
@click.option(
    "--clean", is_flag=True, help="Remove all bindings from the cache instead of building one."
)
@click.option("--verbose", is_flag=True, help="Print the compiler's output if it fails.")
def command(clean: bool, verbose: bool) -> None:
    """Compile the backend 'lockstep' for the installed torch.

    Needs a C++20 compiler: the value of CXX, else c++, g++ or clang++. Takes about one minute of
    processor time, on all cores together. Two ranks test the result before it is used. It is kept
    in $XDG_CACHE_HOME/lockstep/bindings (default: ~/.cache/lockstep/bindings), one for each torch,
    Python and version of Lockstep. If there is one that works already, nothing is compiled.

    Exit status: 0 the backend can be used (or the cache is removed), 1 the compiler or the test
    failed, 2 usage error.
    """
    if sys.platform != "linux":
        raise UsageError(f"build: the backend 'lockstep' needs Linux, and this is {sys.platform}")
    cache = get_cache_folder()
    click.get_current_context().with_resource(exiting_on_sigterm())  # also ends the compilers
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


def _clean(cache: Path) -> None:
    if not cache.is_dir():
        log(f"there are no bindings in {cache}")
        return
    with lock_folder(cache, LOCK_TIMEOUT, _log_waiting):
        size = empty_folder(cache)
    log(f"removed the bindings in {cache} ({format_bytes(size)})")


def _build(cache: Path, verbose: bool) -> None:
    try:
        abi = current_abi()
    except ImportError as error:
        raise UsageError(f"build: torch cannot be imported ({error}): install it first") from None
    module, _ = _find_working()
    if module is None:
        with lock_folder(cache, LOCK_TIMEOUT, _log_waiting):
            module, reason = _find_working()  # the build that this one waited for may suffice
            if reason is not None:
                log(f"{reason}: building it again")
            if module is None:
                begin = time.monotonic()
                module = _compile(cache, abi, verbose)
                size = format_bytes(module.stat().st_size)
                seconds = format_duration(time.monotonic() - begin)
                log(f"built for torch {abi.torch} in {seconds}, and tested: {module} ({size})")
                return
    log(
        f"nothing to build: {module} ({format_bytes(module.stat().st_size)}) was built for torch "
        f"{abi.torch}, and it works"
    )


def _find_working() -> tuple[Path | None, str | None]:
    """Return the module that this process would load, or the reason why it does not work."""
    try:
        module = find_bindings()[0]
    except BindingError:
        return None, None
    try:
        run_self_test(module)
    except SelfTestError as error:
        return None, f"{module} fits this torch but does not work ({error})"
    return module, None


def _compile(cache: Path, abi: ExtensionABI, verbose: bool) -> Path:
    log_file = cache / LOG
    try:
        return build_binding(cache, abi, log_file, _show_progress, _verify)
    except CompilationError as error:
        if verbose and log_file.exists():
            click.echo(log_file.read_text(errors="replace"), err=True)
        what = f" (all output: {log_file})" if log_file.exists() else ""
        raise WorkError(f"build: {error}{what}: {error.advice}") from None
    except SelfTestError as error:
        raise WorkError(
            f"build: the new binding does not work ({error}), so it is not used: set CXX to "
            f"another compiler, or report it with {log_file}"
        ) from None


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{done} of {total} files" + "\n" * (done == total), nl=False, err=True)
    elif done == total:
        click.echo(f"{done} of {total} files", err=True)


def _verify(module: Path) -> None:
    click.echo("testing with two ranks", err=True)
    run_self_test(module)


def _log_waiting(process: int) -> None:
    who = f"process {process}" if process else "another process"
    log(f"another build is running ({who}): waiting for it")
