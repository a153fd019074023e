"""The file in which rank 0 writes where the ranks of one host meet (srun, mpiexec).

    $TMPDIR/lockstep-UID/        0700, owned by this user: others cannot put anything there
        slurm-JOB-STEP           written by rank 0, read by the others, removed when all are there

Another user may have taken these names before. What lies there is never followed or waited
for: a folder or file that is not this user's own is an error at once.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from lockstep.errors import RendezvousError
from lockstep.files import FOLDER_MODE, create_file

__all__ = ["MeetingFile"]

LONGEST = 1 << 12  # bytes
OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class MeetingFile:
    """The meeting file of this launch, as `rank` uses it.

    Every method raises RendezvousError where something else has the name of the folder or
    of the file.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._folder = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"
        self._name = _launch()

    def write(self, text: str) -> None:
        """Write the file, in place of one that an earlier launch of this name left."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, FOLDER_MODE)
        with self._open_folder() as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=folder)
            with os.fdopen(create_file(Path(self._name), dir_fd=folder), "w") as file:
                file.write(text)

    def read(self) -> str | None:
        """Return what rank 0 wrote; None until it did."""
        with contextlib.suppress(FileNotFoundError), self._open_folder() as folder:
            try:
                descriptor = os.open(self._name, OPEN, dir_fd=folder)
            except FileNotFoundError:
                return None
            except OSError as error:  # a link, for example
                raise self._foreign(self._folder / self._name, f"{error.strerror}") from None
            try:
                self._check(self._folder / self._name, descriptor, stat.S_ISREG)
                return os.read(descriptor, LONGEST).decode("ascii", "replace") or None
            finally:
                os.close(descriptor)
        return None

    def remove(self) -> None:
        """Remove the file; the folder stays for other launches."""
        with contextlib.suppress(FileNotFoundError), self._open_folder() as folder:
            os.unlink(self._name, dir_fd=folder)

    @contextlib.contextmanager
    def _open_folder(self) -> Iterator[int]:
        """Open the folder, so that what follows happens in it, whatever has its name then."""
        try:
            folder = os.open(self._folder, OPEN | os.O_DIRECTORY)
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
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise self._foreign(path, f"it belongs to {_user(found.st_uid)}")
        if not is_expected(found.st_mode):
            raise self._foreign(path, "it is of another kind")

    def _foreign(self, path: Path, why: str) -> RendezvousError:
        return RendezvousError(
            f"rank {self._rank}: the ranks of this host meet through {path}, which is not this "
            f"user's own ({why}): remove it, or set TMPDIR to a folder that others cannot write to"
        )


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def _launch() -> str:
    """Return a name that the ranks of one launch share, and no two launches."""
    environ = os.environ
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ:
        return f"slurm-{environ['SLURM_JOB_ID']}-{environ['SLURM_STEP_ID']}".replace("/", "-")
    if "PMIX_NAMESPACE" in environ:
        return environ["PMIX_NAMESPACE"].replace("/", "-")
    parent = psutil.Process().parent()
    started = 0.0 if parent is None else parent.create_time()
    return f"{os.getppid()}-{started:.2f}"
