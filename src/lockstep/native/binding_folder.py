"""Where bindings are: in the package, and in the user's cache.

    lockstep/bindings/                     in the package, from its installation
    ~/.cache/lockstep/bindings/            from `lockstep build`; or in $XDG_CACHE_HOME
        NAME/_native*.so, key.json         a binding and its key; NAME is a hash of the key
        core/libcore.a, key.json           the core
        .lock, .build-*                    held and written by a build

A binding is code that every rank runs, so the cache is used only if nobody else could have
written to it. Folders get their names when they are complete, and a build holds a lock.

setup.py imports this module: it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lockstep.files import make_folder, open_or_create, remove_tree
from lockstep.native.binding_key import BindingKey
from lockstep.native.compilation import ARCHIVE

__all__ = [
    "PACKAGE_FOLDER",
    "find_archive",
    "get_cache_folder",
    "list_bindings",
    "lock_folder",
    "measure_folder",
    "publish",
    "read_installation_reason",
    "reason_not_trusted",
    "temporary_folder",
    "write_key",
    "write_reason",
]

PACKAGE_FOLDER = Path(__file__).parent.parent / "bindings"

KEY, CORE, LOCK, REASON = "key.json", "core", ".lock", "reason.txt"

POLL = 0.1  # seconds between two attempts to get the lock


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
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if found.st_uid != os.geteuid():
        return f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} is writable for others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def list_bindings(folder: Path, is_trusted: bool) -> dict[BindingKey, Path]:
    """Return the bindings of a folder.

    Args:
        folder: The package's folder or the user's cache.
        is_trusted: Whether owner and mode of the files need no check.
    """
    found = {}
    for path in sorted(folder.glob(f"[!.]*/{KEY}")):
        modules = list(path.parent.glob("_native*"))  # its suffix depends on Python
        if len(modules) != 1:
            continue
        if not is_trusted and any(map(reason_not_trusted, (path.parent, path, *modules))):
            continue
        with contextlib.suppress(OSError, ValueError):
            found[BindingKey.from_json(path.read_text())] = modules[0]
    return found


def find_archive(folder: Path, key: Mapping[str, str]) -> Path | None:
    """Return the compiled core of a folder if it has this key, else None."""
    archive = folder / CORE / ARCHIVE
    try:
        is_equal = json.loads((folder / CORE / KEY).read_text()) == key
    except (OSError, ValueError):
        return None
    return archive if is_equal and archive.is_file() else None


def write_key(folder: Path, key: BindingKey | Mapping[str, str]) -> None:
    """Write the key of a binding or of the core into its folder."""
    text = key.to_json() if isinstance(key, BindingKey) else json.dumps(key, indent=1)
    path = folder / KEY
    path.write_text(text + "\n")
    # Some systems have the umask 002. A key that others may write would not be trusted.
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
    deadline = time.monotonic() + timeout
    descriptor = _lock(folder, deadline, before_waiting)
    try:
        for left_over in folder.glob(".build-*"):  # from builds that were killed
            remove_tree(left_over)
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path, deadline: float, before_waiting: Callable[[int], None]) -> int:
    import fcntl  # not on Windows, where `import torch` imports this file through an entry point

    has_told = False
    while True:
        make_folder(folder)
        descriptor = open_or_create(folder / LOCK, os.O_RDWR)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    raise TimeoutError(f"process {holder or '?'} holds {folder / LOCK}") from None
                if not has_told:
                    has_told = True
                    before_waiting(int(holder) if holder.isdecimal() else 0)
                time.sleep(POLL)
            except BaseException:
                os.close(descriptor)
                raise
        if _is_same_file(descriptor, folder / LOCK):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            return descriptor
        os.close(descriptor)  # removed by `lockstep build --clean` in the meantime


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder for a build, inside a folder of bindings; it is removed at the end."""
    made = Path(tempfile.mkdtemp(prefix=".build-", dir=folder))
    try:
        yield made
    finally:
        remove_tree(made)


def publish(complete: Path, destination: Path) -> None:
    """Rename a complete folder to `destination`; replace a folder that is already there."""
    if os.path.lexists(destination):
        old = Path(tempfile.mkdtemp(prefix=".build-old-", dir=destination.parent))
        destination.rename(old / "replaced")
        complete.rename(destination)
        remove_tree(old)
    else:
        complete.rename(destination)


def measure_folder(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
