"""Probes of running ranks: where each rank is, as its launcher sees it from outside.

activity page   what a rank published last, in memory that it shares with the launcher
stack           written by Python's fault handler into an anonymous file, on a signal
/proc           whether it is stopped, and the processor time that it has used (Linux)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from lockstep.comm.activity import Activity, read_activity
from lockstep.launcher.process_stat import read_stat
from lockstep.launcher.stacks import describe_location, read_stacks

__all__ = ["RankProbes", "group_exists"]

ANSWER_SECONDS = 0.1  # processor time after which a rank that executes signal handlers has answered


class RankProbes:
    """The probes of the ranks of one launch.

    Args:
        pids: The ranks' process ids.
        ask: Called with a rank to make it write its stack.
    """

    def __init__(self, pids: Mapping[int, int], ask: Callable[[int], None]) -> None:
        self._pids = pids
        self._ask = ask
        self._stacks: dict[int, int] = {}
        self._activities: dict[int, int] = {}

    def add(self, rank: int, stack: int, activity: int) -> None:
        """Take the descriptors of the files that a rank has sent."""
        self._stacks[rank] = stack
        self._activities[rank] = activity

    def is_stopped(self, rank: int) -> bool:
        """Return whether a running rank is stopped by a signal (SIGSTOP, Ctrl-Z), on Linux."""
        return read_stat(self._pids.get(rank, 0))[:1] == ["T"]

    def cpu_seconds(self, rank: int) -> float:
        """Return the processor time that a rank has used, on Linux; 0 elsewhere."""
        fields = read_stat(self._pids.get(rank, 0))
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def locate(self, rank: int) -> str:
        """Return where a running rank is: "in all_reduce, train.py:31", "stopped", or ""."""
        if self.is_stopped(rank):
            return "stopped"
        return describe_location(self.dump_stacks([rank])[rank])

    def read_activity(self, rank: int) -> Activity:
        """Return what a rank published last."""
        descriptor = self._activities.get(rank)
        return Activity() if descriptor is None else read_activity(descriptor)

    def dump_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the stacks of the main threads of ranks; empty for those that do not answer."""
        files = {rank: self._stacks[rank] for rank in ranks if rank in self._stacks}
        used = {rank: self.cpu_seconds(rank) for rank in files}
        for rank, file in files.items():
            os.ftruncate(file, 0)  # removes an earlier answer
            self._ask(rank)

        def is_starved(rank: int) -> bool:
            is_runnable = read_stat(self._pids.get(rank, 0))[:1] == ["R"]
            return is_runnable and self.cpu_seconds(rank) - used[rank] < ANSWER_SECONDS

        return {**dict.fromkeys(ranks, ""), **read_stacks(files, is_starved)}

    def remove(self, rank: int) -> None:
        """Close the files of a rank that has exited."""
        for files in (self._stacks, self._activities):
            if rank in files:
                os.close(files.pop(rank))

    def close(self) -> None:
        """Close the files of all ranks; from then on nothing is known about them."""
        for rank in [*self._stacks]:
            self.remove(rank)


def group_exists(group: int) -> bool:
    """Return whether a rank's process group still has members, such as data loader workers."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # gone, or its number was reused
        return False
    return True
