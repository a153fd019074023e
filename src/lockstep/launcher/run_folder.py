"""The run folder as the launcher sees it: what was launched, and who uses it now.

    runs/NAME/launch.json   the command, and how it ended
              run.lock      locked by every process that writes to the run

A rank may rename the folder of its launch. Then a link at the old path leads to it until the
launch ends.

Each process of a run keeps a shared lock on `run.lock` until it exits; loader workers that
it forks inherit it. A process that is about to continue the run takes the lock exclusively,
which succeeds only when no other process holds it, and then shares it:

    A   exclusive, writes its name ── shared, reads its name back ─────> holds the run
    B        exclusive: refused ...        exclusive: refused ... ─────> names A

`flock` does not change an exclusive lock into a shared one atomically: B may take the lock
in between. Then A reads B's name instead of its own, and starts again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.files import lock_file, make_folder, open_or_create, replace_file
from lockstep.kernel.errors import FileError, UsageError
from lockstep.launcher.environment import LAUNCHER
from lockstep.launcher.process_stat import read_stat
from lockstep.portable.variables import read_portable_request
from lockstep.redaction import redact

__all__ = [
    "CHECKPOINTS",
    "DESCRIPTION_FILE",
    "RECORD_FILE",
    "RECORD_VERSION",
    "RESUME",
    "RUN",
    "RUNS",
    "LaunchDescription",
    "claim_newest_run",
    "command_words",
    "create_run_folder",
    "describe_launch",
    "find_candidates",
    "find_description",
    "find_launch_folder",
    "find_linked_runs",
    "find_run",
    "hold_run",
    "is_link_to_sibling",
    "is_resuming",
    "link_launch_folder",
    "locate_renamed",
    "name_run",
    "read_description",
    "release_run",
    "remove_old_name",
    "rename_launch_folder",
    "wait_until_free",
    "write_description",
]

RUNS = "runs"  # the folder of the runs, unless another one is given
CHECKPOINTS = "checkpoints"  # the folder of checkpoints in the folder of a run
RUN = "LOCKSTEP_RUN"  # the variable with the path of the launch's run folder
RESUME = "LOCKSTEP_RESUME"  # the variable that is 1 if the launch continues that run
VERSION = 1  # of launch.json
DESCRIPTION_FILE = "launch.json"
RECORD_VERSION = 1  # of record.jsonl
RECORD_FILE = "record.jsonl"  # the record in the folder of a run
KINDS = ("script", "module", "program")
LOCK_FILE = "run.lock"
EXIT_TIMEOUT = 10.0  # seconds that an interrupted run's processes have to exit
POLL = 0.02  # seconds between two attempts to take the lock


def is_resuming() -> bool:
    """Return whether this process belongs to a launch that continues a run."""
    return bool(os.environ.get(RESUME))


@dataclass(frozen=True)
class LaunchDescription:
    """The program that `lockstep run` launched in a run folder.

    Attributes:
        kind: "script", "module" or "program".
        target: The script, module or program.
        arguments: Its arguments.
        nprocs: Ranks on each host.
        nnodes: Number of hosts.
        cwd: The working directory.
        python: The Python interpreter.
        started: When the launch began, in ISO 8601.
        exit_status: The launcher's exit status; None while it runs, or if it was killed.
        is_redacted: Whether secrets were removed, so that the command cannot be repeated.
        min_nprocs: The minimum number of ranks of an elastic run; None for other runs.
        portable: Whether portable bits were asked for; None if nothing was.
        version: Version of the format.
    """

    kind: str
    target: str
    arguments: tuple[str, ...]
    nprocs: int
    nnodes: int
    cwd: str
    python: str
    started: str
    exit_status: int | None = None
    is_redacted: bool = False
    min_nprocs: int | None = None
    portable: bool | None = False  # as in runs of versions that did not store it
    version: int = VERSION

    def is_same_command(self, other: LaunchDescription) -> bool:
        """Return whether `other` would run the same command in the same working directory.

        A run without portable bits is one of an earlier version, or one that was started with
        --no-portable: a command that asks for nothing continues it as it is.
        """
        is_same_kind = self.portable is other.portable or (self.portable, other.portable) == (
            False,
            None,
        )
        return is_same_kind and all(
            getattr(self, name) == getattr(other, name)
            for name in ("kind", "target", "arguments", "cwd")
        )


def describe_launch(
    kind: str,
    target: str,
    arguments: Sequence[str],
    nprocs: int,
    nnodes: int,
    min_nprocs: int | None = None,
) -> LaunchDescription:
    """Return the description of a launch that begins now, without secrets."""
    plain = LaunchDescription(
        kind,
        target,
        tuple(arguments),
        nprocs,
        nnodes,
        cwd=os.getcwd(),
        python=sys.executable,
        started=datetime.datetime.now().astimezone().isoformat(),
        min_nprocs=min_nprocs,
        portable=read_portable_request(os.environ),
    )
    fields = redact(plain)
    described = LaunchDescription(**{**fields, "arguments": tuple(fields["arguments"])})
    return dataclasses.replace(described, is_redacted=described != plain)


def command_words(environ: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    """Return the words of the shell command that started this rank's program.

    Args:
        environ: The environment variables of the rank.
        argv: The arguments of its program, as `sys.argv`.

    Returns:
        The words; `argv` alone if `lockstep run` has not started the program.
    """
    launched = find_description(Path(environ[RUN])) if environ.get(RUN) else None
    if launched is None:
        return list(argv)
    hosts = []
    if launched.nnodes > 1:
        hosts = ["--nnodes", str(launched.nnodes), "--master-addr", environ["MASTER_ADDR"]]
    kind = {"module": ["-m"], "program": ["--no-python"]}.get(launched.kind, [])
    ranks = ["-n", str(launched.nprocs)]
    if launched.min_nprocs is not None:
        ranks = ["--min", str(launched.min_nprocs), "--max", str(launched.nprocs)]
    portable = {True: ["--portable"], False: ["--no-portable"], None: []}[launched.portable]
    words = ["lockstep", "run", *ranks, *hosts, *portable, *kind]
    return [*words, launched.target, *launched.arguments]


def write_description(folder: Path, description: LaunchDescription) -> None:
    """Write RUN/launch.json, for its owner only.

    Raises:
        OSError: The file cannot be written.
    """
    text = json.dumps(dataclasses.asdict(description), indent=2)
    with replace_file(folder / DESCRIPTION_FILE) as file:
        file.write(f"{text}\n".encode())


def read_description(folder: Path) -> LaunchDescription | None:
    """Read RUN/launch.json; None if there is none.

    Raises:
        UsageError: The file cannot be read, or does not describe a launch.
    """
    file = folder / DESCRIPTION_FILE
    try:
        fields = json.loads(file.read_bytes())
        known = {field.name for field in dataclasses.fields(LaunchDescription)}
        description = LaunchDescription(**{key: fields[key] for key in known & fields.keys()})
        datetime.datetime.fromisoformat(description.started)
        words = (description.target, description.cwd, *description.arguments)
        numbers = (description.nprocs, description.nnodes, description.min_nprocs or 0)
        if description.kind not in KINDS or not all(isinstance(word, str) for word in words):
            raise ValueError
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UsageError(
            f"{file} is damaged, so the command of this run is not known; give it again: "
            f"lockstep run --resume {folder} SCRIPT"
        ) from None
    return dataclasses.replace(description, arguments=tuple(description.arguments))


def find_description(folder: Path) -> LaunchDescription | None:
    """Read RUN/launch.json; None if there is none, or if it is damaged."""
    try:
        return read_description(folder)
    except UsageError:
        return None


def find_run(name: str, parent: Path, who: str = "--resume") -> Path:
    """Return the folder of a run that is given as a name in `parent`, or as a path.

    Args:
        name: The name or path.
        parent: The folder of runs.
        who: The option or command that `name` was given to, for messages.

    Raises:
        UsageError: There is no such run.
    """
    if not name:
        auto = ", or auto" if who == "--resume" else ""
        raise UsageError(f"{who}: expected the name or the folder of a run{auto}")
    folders = [path for path in find_candidates(name, parent) if path.is_dir()]
    if folders:
        return folders[0]
    hint = ""
    if who == "--resume":
        hint = (
            "; a run that was killed before its folder existed has nothing to continue: start it "
            "again without --resume (lockstep run --resume auto SCRIPT does so by itself)"
        )
    paths = _order_candidates(name, parent)
    raise UsageError(f"{who} {name}: there is no run {paths[0]} and no folder {paths[1]}{hint}")


def find_candidates(name: str, parent: Path) -> list[Path]:
    """Return the existing paths that the name or path of a run may mean, the best one first."""
    existing = [path for path in _order_candidates(name, parent) if path.exists()]
    return sorted(existing, key=lambda path: not (path / DESCRIPTION_FILE).exists())


def _order_candidates(name: str, parent: Path) -> list[Path]:
    """Return the paths that the name or path of a run may mean: a name first, without a slash."""
    paths = [parent / name, Path(name)]
    return paths[::-1] if os.sep in name else paths


def claim_newest_run(
    parent: Path, description: LaunchDescription
) -> tuple[Path, LaunchDescription] | None:
    """Hold and return the newest run of a command that did not succeed and is not running.

    Args:
        parent: The folder of the runs.
        description: The command, as `describe_launch` returns it.

    Returns:
        Its folder and how it was launched; None if there is no such run.
    """
    runs = []
    for folder in parent.iterdir() if parent.is_dir() else ():
        if is_link_to_sibling(folder):
            continue
        launched = find_description(folder) if folder.is_dir() else None
        if launched and launched.exit_status != 0 and launched.is_same_command(description):
            started = datetime.datetime.fromisoformat(launched.started)
            runs.append((started.timestamp(), folder.name, folder, launched))
    deadline = time.monotonic() + EXIT_TIMEOUT  # for processes of an interrupted run
    for _, _, folder, launched in sorted(runs, key=lambda run: run[:2], reverse=True):
        with contextlib.suppress(UsageError):
            wait_until_free(folder, max(0.0, deadline - time.monotonic()))
            return folder, launched
    return None


# --- the name -----------------------------------------------------------------------------


def name_run(stem: str) -> str:
    """Return the name of a run that begins now, such as "digits-2026-11-21-0752"."""
    return f"{stem}-{datetime.datetime.now():%Y-%m-%d-%H%M}"


def create_run_folder(
    parent: Path, name: str, advice: str = "choose a folder that is writable"
) -> Path:
    """Create a folder called `name`, or `name-2`, `name-3`, ... if there is one already.

    Runs that start at the same time get different folders.

    Args:
        parent: The folder of runs.
        name: The name.
        advice: What the user can do if the folder cannot be created.

    Raises:
        FileError: The folder cannot be created.
    """
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            make_folder(folder, exist_ok=False)
        except FileExistsError:
            if not parent.is_dir():
                reason = f"{parent} is not a folder, so no run can be kept in it"
                raise FileError(f"{reason}; {advice}") from None
            number += 1
        except OSError as error:
            reason = f"{parent / name} cannot be created ({error.strerror})"
            raise FileError(f"{reason}; {advice}") from None
        else:
            return folder


def find_launch_folder() -> Path | None:
    """Return the folder of the launch that started this rank; None if there is none."""
    path = os.environ.get(RUN)
    return Path(path).resolve() if path and os.path.isdir(path) else None


def rename_launch_folder(folder: Path) -> bool:
    """Rename the folder of this launch to `folder`, and leave a link at its old path.

    Returns:
        Whether it is at `folder` now. False if another trainer has renamed it, if something is
        at `folder` already, or if `folder` is on another file system.
    """
    launch = Path(os.environ.get(RUN) or os.devnull)
    if not launch.is_dir() or launch.is_symlink():
        return False
    if launch.resolve() == folder.resolve():
        return True
    try:
        make_folder(folder.parent)
        os.rename(launch, folder)  # fails if `folder` exists and is not empty
    except OSError:
        return False
    try:
        os.symlink(os.path.relpath(folder.resolve(), launch.parent), launch)
    except OSError:  # a file system without links
        os.rename(folder, launch)
        return False
    return True


def link_launch_folder(folder: Path) -> None:
    """Create a link to a run's folder in the folder of its launch, if those are different."""
    launch = find_launch_folder()
    if launch is not None and launch != folder.resolve():
        with contextlib.suppress(OSError):
            os.symlink(os.path.relpath(folder.resolve(), launch), launch / folder.name)


def find_linked_runs(launch: Path) -> list[Path]:
    """Return the run folders that `link_launch_folder` has linked in the folder of a launch."""
    try:
        links = [path for path in sorted(launch.iterdir()) if path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):  # also for a moment, while it is renamed
        return []
    folders = [Path(os.path.normpath(launch / os.readlink(link))) for link in links]
    return [folder for folder in folders if folder.is_dir()]


def locate_renamed(path: Path) -> Path:
    """Return the current path of a launch's folder, which a rank may have renamed."""
    if not path.is_symlink():
        return path
    return path.with_name(path.resolve().name) if is_link_to_sibling(path) else path.resolve()


def remove_old_name(path: Path) -> Path:
    """Return the current path of an ended launch's folder, and remove the link at its old path.

    The link stays if the folder was moved to another parent, so that the run is still found in
    the folder that the launch was given.
    """
    folder = locate_renamed(path)
    if is_link_to_sibling(path):
        with contextlib.suppress(OSError):
            path.unlink()
    return folder


def is_link_to_sibling(path: Path) -> bool:
    """Return whether a path is a link to a folder beside it, such as the old name of a run."""
    return path.is_symlink() and path.resolve().parent == path.parent.resolve()


# --- the lock -----------------------------------------------------------------------------

Inode = tuple[int, int]  # device and number of a file

_held: dict[Inode, int] = {}  # descriptors of the locks that this process keeps


def hold_run(folder: str | os.PathLike[str]) -> None:
    """Mark a run folder as used by this process, until it exits.

    Does nothing where the folder cannot be written, or its file system has no locks.

    Raises:
        UsageError: Another process that is about to continue the run keeps the lock.
    """
    descriptor = _open_lock(folder)
    if descriptor is None:
        return
    if lock_file(descriptor, fcntl.LOCK_SH, EXIT_TIMEOUT) is False:
        raise _make_error(folder, descriptor, EXIT_TIMEOUT)
    _held[_inode(descriptor)] = descriptor


def wait_until_free(folder: str | os.PathLike[str], timeout: float = EXIT_TIMEOUT) -> None:
    """Wait until no other process uses a run folder, then hold it as `hold_run` does.

    If several processes continue a run at the same moment, one of them gets it. Returns at once
    if the run is in use by this process or by a process that started it, such as its launcher.
    In a world without a launcher, call it on one rank before any rank calls `hold_run`.

    Args:
        folder: The run folder.
        timeout: Seconds to wait.

    Raises:
        UsageError: Other processes still use it after `timeout` seconds.
    """
    descriptor = _open_lock(folder)
    if descriptor is None:
        return
    if _belongs_to_launcher(folder) or _is_held_by_ancestor(descriptor):
        os.close(descriptor)
        hold_run(folder)
        return
    deadline = time.monotonic() + timeout
    while not _try_to_claim(descriptor):
        if time.monotonic() >= deadline:
            raise _make_error(folder, descriptor, timeout)
        time.sleep(POLL)
    _held[_inode(descriptor)] = descriptor


def release_run(folder: str | os.PathLike[str]) -> None:
    """Release what `hold_run` or `wait_until_free` took, before the process exits."""
    with contextlib.suppress(OSError):
        status = os.stat(Path(folder) / LOCK_FILE)
        descriptor = _held.pop((status.st_dev, status.st_ino), None)
        if descriptor is not None:
            os.close(descriptor)


def _open_lock(folder: str | os.PathLike[str]) -> int | None:
    """Open the lock file; None if this process already holds it, or it cannot be opened."""
    try:
        descriptor = open_or_create(Path(folder) / LOCK_FILE, os.O_RDWR)
    except OSError:
        return None
    if _inode(descriptor) in _held:
        os.close(descriptor)
        return None
    return descriptor


def _inode(descriptor: int) -> Inode:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _try_to_claim(descriptor: int) -> bool:
    """Take the lock exclusively, and then share it; return False if another process has it."""
    if lock_file(descriptor) is False:
        return False
    name = f"{os.uname().nodename} {os.getpid()} {secrets.token_hex(8)}\n".encode()
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, name, 0)
    except OSError:  # a full disk
        name = b""
    if lock_file(descriptor, fcntl.LOCK_SH) is not False:
        if not name or os.pread(descriptor, len(name), 0) == name:
            return True
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _belongs_to_launcher(folder: str | os.PathLike[str]) -> bool:
    """Return whether `lockstep run` gave this folder to this rank."""
    given = os.environ.get(RUN) if LAUNCHER in os.environ else None
    return bool(given) and Path(given or "").resolve() == Path(folder).resolve()


def _make_error(folder: str | os.PathLike[str], descriptor: int, timeout: float) -> UsageError:
    """Close the descriptor, and return an error that names the process that has claimed the run."""
    host, pid, *_ = [*os.pread(descriptor, 1 << 12, 0).decode(errors="replace").split(), "", ""]
    os.close(descriptor)
    claimed = f" (the last one to begin or continue it was process {pid} on {host})" if pid else ""
    return UsageError(
        f"{os.fspath(folder)} is still in use after {timeout:g} s{claimed}: continue the run when "
        f"its processes have exited"
    )


def _is_held_by_ancestor(descriptor: int) -> bool:
    """Return whether a process that started this one holds the lock (Linux)."""
    inode = _inode(descriptor)
    pid = os.getppid()
    while pid > 0 and not _holds_lock(pid, inode):
        pid = int((read_stat(pid) or ["", "0"])[1])
    return pid > 0


def _holds_lock(pid: int, inode: Inode) -> bool:
    with contextlib.suppress(OSError):  # it has exited, or belongs to another user
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                path = f"/proc/{pid}/fd/{number}"
                if LOCK_FILE not in os.readlink(path):
                    continue
                status = os.stat(path)
                if (status.st_dev, status.st_ino) == inode:
                    lines = Path(f"/proc/{pid}/fdinfo/{number}").read_text()
                    if "\nlock:" in lines:
                        return True
    return False
