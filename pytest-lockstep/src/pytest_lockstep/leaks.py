"""Leaks of a test: processes, groups, threads and shared memory that it leaves behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

__all__ = ["RankLeaks", "find_processes", "find_shared_memory", "list_shared_memory"]

T = TypeVar("T")

PATIENCE = 0.5  # seconds that leaks have to disappear after the test
POLL = 0.002
SHARED_MEMORY = "/dev/shm"
# Files of MPICH and of Open MPI, which remove them themselves. For moments nobody has mapped one,
# so those of an MPI program that runs at the same time would look like leaks of this test.
OF_MPI = ("mpich_shm_", "vader_segment.", "sm_segment.")


class RankLeaks:
    """Finds the leaks of a test in its rank, not counting things that existed before the test."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._processes = set(_list_descendants(os.getpid()))

    def find(self, allowed: Collection[str]) -> list[str]:
        """Return the leaks that remain after `PATIENCE`.

        Args:
            allowed: The kinds of leaks that are ignored.
        """
        searches: Mapping[str, Callable[[], list[str]]] = {
            "threads": self._find_threads,
            "processes": self._find_processes,
            "groups": _find_groups,
        }
        wanted = [search for kind, search in searches.items() if kind not in allowed]

        def search() -> list[str]:
            return [leak for search in wanted for leak in search()]

        if not search():
            return []
        gc.collect()  # an unreachable cycle is not a leak
        return _wait_until_gone(search)

    def _find_threads(self) -> list[str]:
        new = [thread for thread in threading.enumerate() if thread not in self._threads]
        return [f"the thread {thread.name!r}" for thread in new if thread.is_alive()]

    def _find_processes(self) -> list[str]:
        kept = {*self._processes, *_kept_processes()}
        return [
            f"the process {pid} ({_read_command(pid)})"
            for pid in _list_descendants(os.getpid(), kept)
        ]


def find_processes(template: int, ranks: Collection[int]) -> list[tuple[int, str]]:
    """Return the ids and commands of processes that ranks have detached from themselves.

    Args:
        template: The process that adopts the orphans of its ranks.
        ranks: The ranks, which have exited.
    """

    def search() -> list[int]:
        return [pid for pid in _list_descendants(template) if pid not in ranks]

    return [(pid, _read_command(pid)) for pid in _wait_until_gone(search)]


def list_shared_memory() -> set[str]:
    """Return the names of this user's files in shared memory, without those of MPI libraries."""
    names = set()
    if sys.platform == "linux":
        with os.scandir(SHARED_MEMORY) as entries:
            for entry in entries:
                if entry.name.startswith(OF_MPI):
                    continue
                try:
                    if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                        names.add(entry.name)
                except FileNotFoundError:
                    continue
    return names


def find_shared_memory(before: Collection[str]) -> list[str]:
    """Return the files in shared memory that are new and that no process has mapped or open.

    Files of tests that run at the same time are in use, so they are not returned. Folders of other
    running launchers are ignored too.
    """

    def search() -> list[str]:
        new = {
            name
            for name in list_shared_memory().difference(before)
            if not _belongs_to_another_launcher(name)
        }
        used = _used_shared_memory() if new else set()
        return sorted(f"{SHARED_MEMORY}/{name}" for name in new - used)

    return _wait_until_gone(search) if search() else []


def _belongs_to_another_launcher(name: str) -> bool:
    words = name.split("-", 2)  # "lockstep", the launcher's process, a random text
    is_of_launcher = words[0] == "lockstep" and len(words) == 3
    return is_of_launcher and words[1] != str(os.getpid()) and os.path.exists(f"/proc/{words[1]}")


def _wait_until_gone(search: Callable[[], list[T]]) -> list[T]:
    deadline = time.monotonic() + PATIENCE
    while (found := search()) and time.monotonic() < deadline:
        time.sleep(POLL)
    return found


def _find_groups() -> list[str]:
    """Return the process groups of torch other than the default one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return []
    groups = distributed.distributed_c10d._world.pg_names
    default = distributed.group.WORLD
    return [f"the process group {name}" for group, name in groups.items() if group is not default]


def _kept_processes() -> Iterator[int]:
    """Yield the helper processes that Python and Lockstep keep once they were used."""
    for module, path in (
        ("multiprocessing.resource_tracker", "_resource_tracker._pid"),
        ("multiprocessing.forkserver", "_forkserver._forkserver_pid"),
        ("lockstep.launcher.fork_server", "_current.pid"),
    ):
        value: object = sys.modules.get(module)
        for name in path.split("."):
            value = getattr(value, name, None)
        if isinstance(value, int):
            yield value


def _list_descendants(pid: int, known: Collection[int] = ()) -> list[int]:
    """Return the running descendants of a process, without `known` and their descendants."""
    descendants = []
    waiting = [pid]
    while waiting:
        for child in _list_children(waiting.pop()):
            if child not in known and not _is_zombie(child):
                descendants.append(child)
                waiting.append(child)
    return descendants


def _list_children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for task in os.listdir(f"/proc/{pid}/task")
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        ]
    except OSError:  # it has exited, or the system has no /proc
        return []


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _read_command(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return command.replace(b"\0", b" ").decode(errors="replace").strip()[:80]


def _used_shared_memory() -> set[str]:
    """Return the names of the files in shared memory that any process of this user uses."""
    prefix = f"{SHARED_MEMORY}/"
    used: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            paths = [line.partition(prefix)[2] for line in lines if prefix in line]
            for number in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                if target.startswith(prefix):
                    paths.append(target.removeprefix(prefix))
        except OSError:  # it has exited, or belongs to another user
            continue
        used.update(path for path in paths if path)
    return used
