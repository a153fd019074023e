"""Messages about ranks that have not come: which, since when, what to check, and how often."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lockstep.formatting import format_numbered
from lockstep.launcher.environment import RankInfo

__all__ = ["LongWait", "advise_on_late_ranks", "describe_ranks", "is_speaker"]

NOTE_AFTER = 3.0  # seconds until a note is printed
NOTE_INTERVAL = 10.0  # seconds between two notes

# Launchers that give every host the same number of consecutive ranks.
BLOCK_LAUNCHERS = ("lockstep", "torchrun")
# Launchers that bring the output of all hosts to one terminal.
ONE_TERMINAL = ("mpiexec", "srun")


class LongWait:
    """A wait for others, which is over at a deadline, and about which notes are printed.

    Args:
        timeout: Seconds to wait.
    """

    def __init__(self, timeout: float) -> None:
        self._began = time.monotonic()
        self._deadline = self._began + timeout
        self._next_note = self._began + NOTE_AFTER

    @property
    def waited(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """The seconds until the deadline."""
        return self._deadline - time.monotonic()

    @property
    def start(self) -> str:
        """The local time at which it began, as "14:05:11"."""
        return time.strftime("%H:%M:%S", time.localtime(time.time() - self.waited))

    def is_note_due(self) -> bool:
        """Return whether to print a note: early for the first time, and then at intervals."""
        is_due = time.monotonic() >= self._next_note
        if is_due:
            self._next_note = time.monotonic() + NOTE_INTERVAL
        return is_due

    def describe(self, who: str, what: str) -> str:
        """Return what `who` waits for, since when and how long more."""
        return (
            f"{who} has waited {self.waited:.0f} s (since {self.start}) for {what}, and waits "
            f"{self.left:.0f} s more"
        )


def is_speaker(rank_info: RankInfo) -> bool:
    """Return whether this rank prints notes while the store, and so every other rank, is missing.

    The first rank of each host does, as each has its own terminal; where one terminal shows all
    of them, the last rank does, which with several hosts is usually not on that of rank 0.
    """
    if rank_info.launcher in ONE_TERMINAL:
        return rank_info.rank == rank_info.world_size - 1
    return rank_info.local_rank == 0 or "local_rank" in rank_info.unknown


def describe_ranks(ranks: Sequence[int], rank_info: RankInfo) -> str:
    """Return "ranks 2 and 3 of 4", or "host 1 (ranks 2 and 3 of 4)" if these are all its ranks.

    Args:
        ranks: Some ranks, ascending.
        rank_info: This rank.
    """
    text = f"{format_numbered('rank', ranks)} of {rank_info.world_size}"
    hosts = _whole_hosts(ranks, rank_info)
    return f"{format_numbered('host', hosts)} ({text})" if hosts else text


def advise_on_late_ranks(ranks: Sequence[int], rank_info: RankInfo) -> str:
    """Return what to check if these ranks have not come.

    Args:
        ranks: The missing ranks, ascending.
        rank_info: This rank.
    """
    if rank_info.is_single_host:
        return "check their logs, or increase init(timeout=...)"
    hosts = _whole_hosts(ranks, rank_info)
    reach = f"can reach {rank_info.store_location} through every firewall"
    if hosts and rank_info.launcher == "lockstep":
        options = f"--node-rank {hosts[0]}" if len(hosts) == 1 else "their own --node-rank"
        return f"check that lockstep run was started there with {options} and {reach}"
    return (
        f"check that they were started with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, "
        f"each with its own RANK, and {reach}"
    )


def _whole_hosts(ranks: Sequence[int], rank_info: RankInfo) -> list[int]:
    """Return the hosts whose ranks these are; none if they are not all ranks of some hosts."""
    size = rank_info.local_world_size
    is_block = rank_info.launcher in BLOCK_LAUNCHERS and rank_info.rank // size == rank_info.host
    if rank_info.is_single_host or rank_info.unknown or not is_block:
        return []
    hosts = sorted({rank // size for rank in ranks})
    return hosts if len(ranks) == len(hosts) * size else []
