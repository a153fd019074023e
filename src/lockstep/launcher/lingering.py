"""Ranks that go on alone: who returned, and who was stopped, while others wait for them.

The launcher cannot know that a rank waits; it asks, with a signal that Python's
fault handler answers (launcher/stack.py). Seldom, and only once a rank has returned.
"""

from __future__ import annotations

import time

from lockstep.launcher import stack
from lockstep.launcher.job import Job
from lockstep.launcher.verdict import spoken
from lockstep.messages import say

__all__ = ["Lingering"]

LINGER = 5.0  # seconds to the first question; each later one waits twice as long


class Lingering:
    """Watches one job and says each thing once; `look` may be called as often as one likes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pause = LINGER
        self._next = time.monotonic() + LINGER
        self._said: set[int] = set()

    def look(self) -> None:
        """Say what there is to say, where it is time to look."""
        if time.monotonic() < self._next:
            return
        for rank in self._job.running:
            if rank not in self._said and self._job.stopped(rank):
                self._said.add(rank)
                pid = self._job.pids[rank]
                say(f"rank {rank} is stopped, process {pid}: kill -CONT {pid} lets it go on")
        if self._look_for_leavers():
            self._pause *= 2
        self._next = time.monotonic() + self._pause

    def _look_for_leavers(self) -> bool:
        """Ask the others where they are, where one returned; whether they were asked."""
        outcomes = self._job.outcomes.values()
        left = [o.rank for o in outcomes if o.left and o.rank not in self._said]
        if not left:
            return False
        places = []
        for rank in self._job.running:
            dump = self._job.dump(rank)
            if stack.waiting(dump):
                places.append(f"rank {rank} waits {stack.where(dump)}".strip())
        if places:
            self._said.update(left)
            say(f"{spoken(left)} returned, while {'; '.join(places)}")
        return True
