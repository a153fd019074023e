"""Where bindings are: in the package, and in the user's cache.

    lockstep/bindings/                     in the package, from its installation
    ~/.cache/lockstep/bindings/            from `lockstep build`; or in $XDG_CACHE_HOME
        NAME/_native*.so, key.json         a binding and its ABI; NAME is a hash of the ABI
        .lock, .build-*                    held and written by a build

A binding is code that every rank runs, so the cache is used only if nobody else could have
written to it. Folders get their names when they are complete, and a build holds a lock.

setup.py imports this module: it needs torch and the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lockstep.comm.native.extension_abi import ExtensionABI
from lockstep.files import lock_file, make_folder, open_or_create, remove_tree

__all__ = [
    "PACKAGE_FOLDER",
    "empty_folder",
    "get_cache_folder",
    "list_bindings",
    "lock_folder",
    "read_installation_reason",
    "reason_not_trusted",
    "replace_folder",
    "temporary_folder",
    "write_abi",
    "write_reason",
]

PACKAGE_FOLDER = Path(__file__).parents[2] / "bindings"

ABI = "key.json"
LOCK = ".lock"
REASON = "reason.txt"


def get_cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the user's bindings, which may not exist."""
    parent = Path(environment.get("XDG_CACHE_HOME", ""))
    if not parent.is_absolute():  # the XDG specification ignores relative paths
        # The "/" matters without a home: /~ cannot be created, but ./~ could be.
        parent = Path("/", os.path.expanduser("~"), ".cache")
    return parent / "lockstep" / "bindings"


def reason_not_trusted(path: Path) -> str | None:
    """Return why a file or folder of the cache must not be used; None if it may be used.

    It must belong to this user, and nobody else may be able to write to it.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} is writable for others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def list_bindings(folder: Path, is_trusted: bool) -> dict[ExtensionABI, Path]:
    """Return the bindings of a folder.

    Args:
        folder: The package's folder or the user's cache.
        is_trusted: Whether owner and mode of the files need no check.
    """
    bindings = {}
    for path in sorted(folder.glob(f"[!.]*/{ABI}")):
        modules = list(path.parent.glob("_native*"))
        if len(modules) != 1:
            continue
        if not is_trusted and any(map(reason_not_trusted, (path.parent, path, *modules))):
            continue
        with contextlib.suppress(OSError, ValueError):
            bindings[ExtensionABI.from_json(path.read_text())] = modules[0]
    return bindings


def write_abi(folder: Path, abi: ExtensionABI) -> None:
    """Write the ABI of a binding into its folder."""
    path = folder / ABI
    path.write_text(abi.to_json() + "\n")
    # Some systems have the umask 002. A file that others may write would not be trusted.
    path.chmod(0o644 & folder.stat().st_mode)


def read_installation_reason() -> str | None:
    """Return why the installation built no binding, in one sentence; None if it built one."""
    with contextlib.suppress(OSError):
        return (PACKAGE_FOLDER / REASON).read_text().strip() or None
    return None


def write_reason(folder: Path, reason: str | None) -> None:
    """Write why an installation built no binding; None removes the reason of an earlier one."""
    if reason is None:
        (folder / REASON).unlink(missing_ok=True)
    else:
        (folder / REASON).write_text(reason + "\n")


@contextlib.contextmanager
def lock_folder(
    folder: Path, timeout: float, before_waiting: Callable[[int], None] = lambda process: None
) -> Iterator[None]:
    """Hold the lock of a folder, which is created if it is missing.

    Args:
        folder: The folder of bindings.
        timeout: Seconds to wait for another process.
        before_waiting: Called once before a wait, with the process id of the lock's holder; 0 if
            it is unknown.

    Raises:
        TimeoutError: Another process still holds the lock after `timeout`.
        OSError: The folder cannot be created or written.
    """
    make_folder(folder)
    with os.fdopen(open_or_create(folder / LOCK, os.O_RDWR), "r+") as lock:
        if lock_file(lock.fileno()) is False:
            holder = lock.read(20).strip()
            before_waiting(int(holder) if holder.isdecimal() else 0)
            if lock_file(lock.fileno(), timeout=timeout) is False:
                raise TimeoutError(f"process {holder or '?'} holds {folder / LOCK}")
        lock.seek(0)
        lock.truncate()
        print(os.getpid(), file=lock, flush=True)
        for left_over in folder.glob(".build-*"):  # from builds that were killed
            remove_tree(left_over)
        yield


def empty_folder(folder: Path) -> int:
    """Remove all bindings from a folder whose lock is held; the lock's file stays.

    Returns:
        The bytes of the removed files.
    """
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    for path in folder.iterdir():
        if path.is_dir():
            remove_tree(path)
        elif path.name != LOCK:
            path.unlink()
    return size


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder for a build, inside a folder of bindings; it is removed at the end."""
    made = Path(tempfile.mkdtemp(prefix=".build-", dir=folder))
    try:
        yield made
    finally:
        remove_tree(made)


def replace_folder(complete: Path, destination: Path) -> None:
    """Rename a complete folder to `destination`; replace a folder that is already there."""
    if os.path.lexists(destination):
        old = Path(tempfile.mkdtemp(prefix=".build-old-", dir=destination.parent))
        destination.rename(old / "replaced")
        complete.rename(destination)
        remove_tree(old)
    else:
        complete.rename(destination)
