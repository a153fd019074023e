"""The round that is going on: who is in it, who has died, come to the end, or reported."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from lockstep.elastic.round_plan import Report

__all__ = ["CurrentRound"]


@dataclass
class CurrentRound:
    """A round as its launcher sees it.

    Attributes:
        number: Its number, from 0.
        members: Its members, by rank.
        lost: Those that died, and the signals; 0 for one that ended because it lost another one.
        done: Those that came to the end of their script.
        reports: What those that left the round have reported.
        noticed: When the first death was noticed, in Unix time; None if nobody has died.
        reported: When the last report came, in `time.monotonic()` seconds.
    """

    number: int = 0
    members: tuple[int, ...] = ()
    lost: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    reports: dict[int, Report] = field(default_factory=dict)
    noticed: float | None = None
    reported: float = 0.0

    def note_report(self, report: Report) -> None:
        """Note what a member has reported at the end of the round."""
        self.reports[report.member], self.reported = report, time.monotonic()

    def lose(self, member: int, number: int) -> None:
        """Note that a member is gone, by a signal or because it lost another one (0)."""
        self.lost[member] = number
        self.reports.pop(member, None)
        if self.noticed is None:
            self.noticed = time.time()

    @property
    def unended(self) -> list[int]:
        """The members whose end has not been noted, by rank."""
        ended = self.lost.keys() | self.done
        return [member for member in self.members if member not in ended]

    @property
    def is_admission(self) -> bool:
        """Whether all that have reported did so at a safe point, to let members join or leave."""
        return all(report.is_admission for report in self.reports.values())

    @property
    def seconds_since_report(self) -> float:
        """The seconds since the last report."""
        return time.monotonic() - self.reported

    def clear(self) -> None:
        """Forget the members, which are all to be replaced."""
        self.members = ()
        self.lost.clear()
        self.done.clear()

    def describe_end(self) -> dict[str, Any]:
        """Return the number of the next round, and why this one is over."""
        return {
            "round": self.number + 1,
            "lost": [{"member": each, "signal": number} for each, number in self.lost.items()],
            "noticed": time.time() if self.noticed is None else self.noticed,
        }

    def follow(self, members: tuple[int, ...]) -> CurrentRound:
        """Return the next round; who came to the end of the script is done in it, too."""
        return CurrentRound(self.number + 1, members, done=self.done)
