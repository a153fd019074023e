"""Messages about ranks that have not come: which, since when, what to check, and how often."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lockstep.launcher.environment import RankInfo

__all__ = ["NoteTimer", "advise", "describe_ranks", "format_start", "is_speaker"]

# Launchers that give every host the same number of consecutive ranks.
BLOCK_LAUNCHERS = ("lockstep", "torchrun")
# Launchers that bring the output of all hosts to one terminal.
ONE_TERMINAL = ("mpiexec", "srun")


class NoteTimer:
    """When to print the next note, although several ranks may print one.

    A note is due `first` seconds after `started`, and again `interval` seconds after any rank has
    printed one. All times are those of one clock, in seconds.
    """

    def __init__(self, started: float, first: float, interval: float) -> None:
        self._next = started + first
        self._interval = interval
        self._printed = 0

    def is_due(self, now: float, printed: int) -> bool:
        """Return whether to print.

        Args:
            now: The time.
            printed: Number of notes that have been printed, by any rank.
        """
        if printed != self._printed:
            self._printed, self._next = printed, now + self._interval
        return now >= self._next


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
    text = f"{_enumerate('rank', ranks)} of {rank_info.world_size}"
    hosts = _whole_hosts(ranks, rank_info)
    return f"{_enumerate('host', hosts)} ({text})" if hosts else text


def format_start(waited: float) -> str:
    """Return the local time at which a wait of `waited` seconds began, as "14:05:11"."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - waited))


def advise(ranks: Sequence[int], rank_info: RankInfo) -> str:
    """Return what to check if these ranks have not come.

    Args:
        ranks: The missing ranks, ascending.
        rank_info: This rank.
    """
    if rank_info.is_single_host or rank_info.master_addr is None:
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


def _enumerate(noun: str, numbers: Sequence[int]) -> str:
    """Return "rank 2", "ranks 0 and 2", or "ranks 0, 2 and 4 to 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    parts: list[str] = []
    for span in spans:
        is_long = len(span) > 3
        parts += [f"{span[0]} to {span[-1]}"] if is_long else [str(each) for each in span]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{noun}{'s' if len(numbers) > 1 else ''} {listed}"
