"""Files that only their owner can read: how Lockstep creates folders and files.

    make_folder     a run's folder                  0700
    create_file     a record, a log                 0600, a new file
    open_or_create  a lock, a continued log         0600 if it is new
    open_for_write  a report                        0600 if it is new
    write_output    a table of measurements         0600 if it is new
    replace_file    weights                         0600, replaced atomically
    read_json       a manifest, a state             refused unless it is what Lockstep writes
    lock_file       a record, a run                 held until it is closed
    remove_tree     a checkpoint                    removed with all that is in it

The modes are set when a file is created, so others can never open it in between, and no
umask widens them. Existing folders and files keep their modes: use `chmod` to share one.
Where something is removed or replaced, that is the link and never what it leads to.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from lockstep.kernel.errors import FileError

__all__ = [
    "FOLDER_MODE",
    "create_file",
    "lock_file",
    "make_folder",
    "open_for_write",
    "open_or_create",
    "read_json",
    "remove_tree",
    "replace_file",
    "sync_folder",
    "write_output",
]

FILE_MODE = 0o600
FOLDER_MODE = 0o700
LOCK_POLL = 0.02  # seconds between two attempts to lock a file


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Create a folder, and missing parents, for their owner alone.

    Raises:
        FileExistsError: the folder exists and `exist_ok` is false, or a file has its name.
        OSError: the folder cannot be created.
    """
    if not path.parent.is_dir():
        make_folder(path.parent)
    try:
        path.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        if not (exist_ok and path.is_dir()):
            raise


def create_file(path: Path, flags: int = 0, dir_fd: int | None = None) -> int:
    """Create a file and return a descriptor to write to it; the options are those of `os.open`.

    Raises:
        FileExistsError: something has this name already; a link is not followed.
        OSError: the file cannot be created.
    """
    exclusive = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, exclusive | flags, FILE_MODE, dir_fd=dir_fd)


def open_or_create(path: Path, flags: int) -> int:
    """Return a descriptor of a file, which is created if it is missing; a link is not followed.

    Args:
        path: The file.
        flags: Options of `os.open`, such as `os.O_RDWR` or `os.O_WRONLY | os.O_APPEND`.

    Raises:
        OSError: the file cannot be opened or created.
    """
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def open_for_write(path: Path) -> BinaryIO:
    """Open an output that the user named, emptied if it exists; a device or pipe works too.

    A link to a file is replaced. The file that it leads to stays as it is.
    """
    is_of_system = path.absolute().parts[1:2] in (("dev",), ("proc",))  # such as /dev/stdout
    if path.is_symlink() and not is_of_system and (path.is_file() or not path.exists()):
        path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, FILE_MODE), "wb")


def write_output(path: Path, content: str | bytes) -> None:
    """Write an output that the user named.

    Raises:
        FileError: It cannot be written.
    """
    try:
        with open_for_write(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def replace_file(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Yield a new file that takes the name `path` when the block ends without an error.

    Until then the old file stays as it is, also after an error or the end of the process.
    The temporary file is in the same folder, under a random name.

    Args:
        path: The name of the file. A link of this name is replaced, not followed.
        mode: The permissions of the file. None: those of the replaced file if it belongs to
            the user, else 0600.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = create_file(temporary)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(descriptor, _mode_of(path) if mode is None else mode)
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def read_json(path: Path) -> Any:
    """Return the value in a JSON file that Lockstep has written.

    Raises:
        OSError: The file cannot be read.
        FileError: It is not JSON, names an entry twice, has NaN or Infinity, or is nested too
            deeply.
    """
    try:
        return json.loads(
            path.read_bytes(), object_pairs_hook=_unique_entries, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise FileError(f"{path.name} is damaged: {reason}") from None


def _unique_entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("an entry occurs twice")
    return entries


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def lock_file(descriptor: int, kind: int = fcntl.LOCK_EX, timeout: float = 0.0) -> bool | None:
    """Lock an open file, as `fcntl.flock` does.

    Args:
        descriptor: The file, which is unlocked when all its copies are closed.
        kind: `LOCK_EX` or `LOCK_SH`.
        timeout: Seconds to wait for other processes.

    Returns:
        Whether it is locked; None if the file system has no locks.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_POLL)
        except OSError:
            return None
        else:
            return True


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it, as far as this user can; of a link only the link."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _mode_of(path: Path) -> int:
    """Return the permissions of the file at `path` if it is the user's, else of a new file."""
    try:
        status = os.lstat(path)
    except OSError:
        return FILE_MODE
    own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return stat.S_IMODE(status.st_mode) & 0o777 if own else FILE_MODE


def sync_folder(folder: Path) -> None:
    """Make a rename survive a crash of the machine, if the file system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
