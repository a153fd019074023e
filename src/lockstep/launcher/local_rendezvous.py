"""Rendezvous of the ranks of one host, out of the reach of other users.

A TCPStore listens on a port: every user of the machine can read and change its keys, including
the addresses at which the ranks connect to each other. Two things replace it on one host:

- A private store: a FileStore on an anonymous file. Other processes open the file as
  /proc/PID/fd/FD of its creator, which the kernel permits to the same user only (Linux).
  FileStore polls every 10 ms and counts its timeouts in whole seconds.
- A rendezvous file, in which rank 0 writes the address of that store if no launcher passes
  it on (srun, mpiexec):

    $TMPDIR/lockstep-UID/        mode 0700, owned by this user: others cannot write there
        slurm-JOB-STEP           written by rank 0, read by the others, then removed

Another user may have created something with these names. Links are never followed and pipes
never waited for: a folder or file that does not belong to this user raises an error at once.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.files import FOLDER_MODE, create_file
from lockstep.kernel.errors import RendezvousError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["RendezvousFile", "attach_store", "create_store"]

STORE_NAME = "lockstep-store"
MAX_ADDRESS = 1 << 12  # bytes
OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def create_store() -> tuple[int, str] | None:
    """Create an empty private store; it exists as long as any process holds its descriptor.

    Returns:
        The descriptor, and the address with which processes of this user attach to the
        store; None if the system has no anonymous files.
    """
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        return None
    descriptor = os.memfd_create(STORE_NAME)
    os.fchmod(descriptor, 0o600)
    return descriptor, f"{os.getpid()} {descriptor} {os.fstat(descriptor).st_ino}"


def attach_store(address: str) -> Store | None:
    """Return the private store at `address`; None if there is none that this user may open.

    From then on this process keeps the store alive, even after its creator has exited.
    """
    from torch.distributed import (  # type: ignore[attr-defined]
        FileStore,  # imported here: the launcher creates stores without importing torch
    )

    numbers = address.split()
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        return None
    pid, number, inode = map(int, numbers)
    path = f"/proc/{pid}/fd/{number}"
    try:
        # Check the name first: the descriptor may belong to another file by now, and opening
        # that may have side effects.
        if not os.readlink(path).startswith(f"/memfd:{STORE_NAME} "):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    status = os.fstat(descriptor)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_ino != inode:
        os.close(descriptor)
        return None
    return FileStore(f"/proc/self/fd/{descriptor}", -1)


class RendezvousFile:
    """The rendezvous file of this launch, as used by `rank`.

    Every method raises RendezvousError if the folder or the file belongs to another user or
    is not a folder or regular file.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._folder = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
        self._name = _launch_name()

    def write(self, text: str) -> None:
        """Write the file; replace a file that an earlier launch of this name left."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, FOLDER_MODE)
        with self._open_folder() as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=folder)
            with os.fdopen(create_file(Path(self._name), dir_fd=folder), "w") as file:
                file.write(text)

    def read(self) -> str | None:
        """Return what rank 0 wrote; None before that."""
        with contextlib.suppress(FileNotFoundError), self._open_folder() as folder:
            try:
                descriptor = os.open(self._name, OPEN_FLAGS, dir_fd=folder)
            except FileNotFoundError:
                return None
            except OSError as error:  # a symbolic link, for example
                raise self._foreign(self._folder / self._name, f"{error.strerror}") from None
            try:
                self._check(self._folder / self._name, descriptor, stat.S_ISREG)
                return os.read(descriptor, MAX_ADDRESS).decode("ascii", "replace") or None
            finally:
                os.close(descriptor)
        return None

    def remove(self) -> None:
        """Remove the file; the folder stays for other launches."""
        with contextlib.suppress(FileNotFoundError), self._open_folder() as folder:
            os.unlink(self._name, dir_fd=folder)

    @contextlib.contextmanager
    def _open_folder(self) -> Iterator[int]:
        """Open the folder, so that later operations use it even if its name is reassigned."""
        try:
            folder = os.open(self._folder, OPEN_FLAGS | os.O_DIRECTORY)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._foreign(self._folder, f"{error.strerror}") from None
        try:
            self._check(self._folder, folder, stat.S_ISDIR)
            os.fchmod(folder, FOLDER_MODE)
            yield folder
        finally:
            os.close(folder)

    def _check(self, path: Path, descriptor: int, is_expected: Callable[[int], bool]) -> None:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise self._foreign(path, f"it belongs to {_user_name(status.st_uid)}")
        if not is_expected(status.st_mode):
            raise self._foreign(path, "its file type is not the expected one")

    def _foreign(self, path: Path, reason: str) -> RendezvousError:
        return RendezvousError(
            f"rank {self._rank}: the ranks of this host connect through {path}, which is not safe "
            f"to use ({reason}): remove it, or set TMPDIR to a folder that others cannot write to"
        )


def _user_name(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def _launch_name() -> str:
    """Return a name that all ranks of one launch share, and that differs between launches."""
    environ = os.environ
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ:
        return f"slurm-{environ['SLURM_JOB_ID']}-{environ['SLURM_STEP_ID']}".replace("/", "-")
    if "PMIX_NAMESPACE" in environ:
        return environ["PMIX_NAMESPACE"].replace("/", "-")
    import psutil  # imported here: the launcher creates stores without it

    parent = psutil.Process().parent()
    started = 0.0 if parent is None else parent.create_time()
    return f"{os.getppid()}-{started:.2f}"
