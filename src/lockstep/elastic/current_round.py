"""The current round: its members, and which of them have died, finished or reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.comm.activity import ALL_OTHERS, Activity
from lockstep.elastic.round_plan import Report

__all__ = ["CurrentRound"]

STUCK = 10.0  # seconds that a member waits for a lost one before it counts as stuck


@dataclass
class CurrentRound:
    """The state of the current round, as its launcher knows it.

    Attributes:
        number: Its number, from 0.
        members: Its members, by rank.
        lost: The members that died, with the signal that killed each; 0 for a member that exited
            because it lost another one.
        done: The members whose script has ended.
        reports: The reports of the members that have left the round.
        noticed: When the first death was noticed, in Unix time; None if nobody has died.
        reported: When the last report came, in `time.monotonic()` seconds.
        stuck: The members that are killed because they still waited for a lost one.
        writers: The members that are writing the state for the processes that replace them.
        unexplained: The number of rounds in a row that ended although no member had died.
    """

    number: int = 0
    members: tuple[int, ...] = ()
    lost: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    reports: dict[int, Report] = field(default_factory=dict)
    noticed: float | None = None
    reported: float = 0.0
    stuck: set[int] = field(default_factory=set)
    writers: set[int] = field(default_factory=set)
    unexplained: int = 0

    def note_report(self, report: Report) -> None:
        """Store the report of a member at the end of the round."""
        self.reports[report.member] = report
        self.reported = time.monotonic()

    def lose(self, member: int, number: int) -> None:
        """Record that a member was killed by a signal, or exited because it lost another (0)."""
        self.lost[member] = number
        self.reports.pop(member, None)
        if self.noticed is None:
            self.noticed = time.time()

    def find_stuck(
        self, members: Iterable[int], read_activity: Callable[[int], Activity]
    ) -> Iterator[tuple[int, int]]:
        """Yield members that go on waiting for a lost one, each once and with that one.

        If Gloo finds that a connection is closed while it writes a message, it forgets the message
        and never wakes the thread that waits for it.
        """
        if self.noticed is None or time.time() - self.noticed < STUCK:
            return
        for member in set(members) - self.reports.keys() - self.stuck:
            activity = read_activity(member)
            rank = activity.awaited
            if rank is None or time.monotonic() - activity.wait_since < STUCK:
                continue
            for lost in self.members if rank == ALL_OTHERS else self.members[rank:][:1]:
                if lost in self.lost:
                    self.stuck.add(member)
                    yield member, lost
                    break

    @property
    def unended(self) -> list[int]:
        """The members that are not recorded as lost or done, by rank."""
        ended = self.lost.keys() | self.done
        return [member for member in self.members if member not in ended]

    @property
    def is_admission(self) -> bool:
        """Whether all reports were sent at a safe point, to let members join or leave."""
        return all(report.is_admission for report in self.reports.values())

    @property
    def seconds_since_report(self) -> float:
        """The seconds since the last report."""
        return time.monotonic() - self.reported

    def clear(self) -> None:
        """Remove the members, all of which are to be replaced."""
        self.members = ()
        self.lost.clear()
        self.done.clear()

    def describe_end(self) -> dict[str, Any]:
        """Return the number of the next round, and the reason why this one ended."""
        return {
            "round": self.number + 1,
            "lost": [{"member": member, "signal": number} for member, number in self.lost.items()],
            "noticed": time.time() if self.noticed is None else self.noticed,
        }

    def begin_next(self, members: tuple[int, ...]) -> None:
        """Become the next round; members whose script has ended stay done in it."""
        if self.lost:
            self.unexplained = 0
        self.number = self.number + 1
        self.members = members
        self.lost.clear()
        self.reports.clear()
        self.stuck.clear()
        self.noticed = None
