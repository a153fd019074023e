"""A thread that kills the ranks of an elastic run as planned.

The ranks run unchanged code, and the kills come from outside: a thread of the launching process
reads the lines of the record as they are written, and sends a signal when the planned part of a
step has passed. A rank is killed only while another rank has the state of the training.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.elastic.coordinator import ElasticCoordinator
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.record.columns import Column
from lockstep.tools.check.chaos_result import Kill
from lockstep.tools.check.kill_plan import PlannedKill
from lockstep.tools.check.record_follower import POLL, RecordFollower, Report

__all__ = ["Killer"]


@dataclass
class _Watched:
    """The state of the launch, as the thread observes it."""

    ranks: RankSupervisor
    rounds: ElasticCoordinator
    killed: set[int] = field(default_factory=set)
    trained: frozenset[int] = frozenset()  # the members of the latest recorded round

    def note_round(self, recorded: int) -> None:
        """Store the members if the current round is the latest one in the record."""
        if recorded == self.rounds.number:
            self.trained = frozenset(self.rounds.members)

    def find_ranks(self) -> list[tuple[int, int]]:
        """Return (rank, member) for each running member."""
        return [
            (rank, member)
            for rank, member in enumerate(self.rounds.members)
            if member in self.ranks.pids and member not in self.killed and self._runs(member)
        ]

    def _runs(self, member: int) -> bool:
        outcome = self.ranks.outcomes.get(member)
        return outcome is not None and outcome.status is None


class Killer(RecordFollower):
    """A thread that kills ranks as planned.

    Args:
        planned: The planned kills, in the order of their positions.
        intervals: The seconds that each step took in an undisturbed run.
        report: Called with each line about the progress.

    Attributes:
        kills: The kills that were carried out.
    """

    def __init__(self, planned: Sequence[PlannedKill], intervals: Column, report: Report) -> None:
        super().__init__(report)
        self.kills: list[Kill] = []
        self._planned, self._intervals = planned, intervals
        self._watched: _Watched | None = None

    def watch(self, ranks: RankSupervisor, rounds: ElasticCoordinator) -> None:
        """Set the supervisor and the rounds to observe; call it before the thread begins."""
        self._watched = _Watched(ranks, rounds)

    def count_rounds(self) -> int:
        """Return the number of rounds."""
        return 0 if self._watched is None else self._watched.rounds.number + 1

    def _run(self) -> None:
        assert self._watched is not None
        for planned in self._planned:
            if not self._wait_for_moment(planned) or not self._kill(planned, self._watched):
                return
        super()._run()

    def _wait_for_moment(self, planned: PlannedKill) -> bool:
        if not self._wait(lambda: self._has_begun and self._steps >= planned.step):
            return False
        if self._steps > planned.step:  # an earlier kill came late
            return True
        seconds = planned.part * float(self._intervals[planned.step])
        return self._wait(lambda: self._steps > planned.step, time.monotonic() + seconds)

    def _kill(self, planned: PlannedKill, watched: _Watched) -> bool:
        """Kill a rank once another one can continue; return False if the run ends before."""
        while (chosen := self._choose(planned, watched)) is None:
            if self._ended.wait(POLL):
                return False
            self._read()
        rank, member = chosen
        step, now = self._steps, time.time()
        try:
            os.kill(watched.ranks.pids[member], signal.SIGKILL)
        except ProcessLookupError:
            return self._kill(planned, watched)
        watched.killed.add(member)
        self.kills.append(Kill(planned, member, rank, step, now))
        self._report(
            f"kill {len(self.kills)} of {len(self._planned)}: member {member} (rank {rank}) in "
            f"step {step:,}"
        )
        return True

    def _choose(self, planned: PlannedKill, watched: _Watched) -> tuple[int, int] | None:
        """Return (rank, member) to kill; None while no other member could continue."""
        watched.note_round(self._round)
        ranks = watched.find_ranks()
        if not ranks:
            return None
        rank, member = ranks[planned.rank % len(ranks)]
        others = watched.trained.intersection(running for _, running in ranks) - {member}
        return (rank, member) if others else None
