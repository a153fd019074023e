"""The newcomers of an elastic run: members that have started and not joined a round yet.

    started ── imports, runs its script alone ──> ready ──> joins at the next safe point
       └────────── killed, or an exception ─────────┴─────> the others go on without it

After several newcomers in a row that end before they are ready, no more are started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lockstep.launcher.failure_attribution import Outcome, describe_end
from lockstep.messages import log

__all__ = ["Newcomers"]

MAX_DEATHS = 5  # of newcomers in a row that were not ready


class Newcomers:
    """The newcomers, the oldest first.

    Args:
        start: Starts a newcomer for a given rank, and returns its number as a member.
    """

    def __init__(self, start: Callable[[int], int]) -> None:
        self._start = start
        self._is_ready: dict[int, bool] = {}
        self._deaths = 0

    def __iter__(self) -> Iterator[int]:
        """Return their numbers as members."""
        return iter([*self._is_ready])

    def __len__(self) -> int:
        """Return the number of newcomers."""
        return len(self._is_ready)

    def __contains__(self, member: object) -> bool:
        """Return whether a member is a newcomer."""
        return member in self._is_ready

    @property
    def ready(self) -> list[int]:
        """The newcomers that can join."""
        return [member for member, is_ready in self._is_ready.items() if is_ready]

    def start_missing(self, members: int, wanted: int) -> bool:
        """Start those that are missing; return whether there are any newcomers then.

        Args:
            members: The number of members of the round.
            wanted: The number of ranks that the run should have.
        """
        for rank in range(members + len(self), wanted if self._deaths < MAX_DEATHS else 0):
            self._is_ready[self._start(rank)] = False
        return bool(self._is_ready)

    def permit(self) -> None:
        """Permit newcomers again after too many have ended."""
        self._deaths = 0

    def note_ready(self, member: int) -> None:
        """Note that a newcomer can join."""
        self._is_ready[member] = True
        self._deaths = 0

    def remove(self, member: int) -> bool:
        """Remove a newcomer that joins or leaves; return whether it was ready."""
        return self._is_ready.pop(member)

    def note_end(self, member: int, outcome: Outcome, *, is_failure: bool) -> None:
        """Remove one that has ended, and say so: the others go on without it.

        Args:
            member: Its number.
            outcome: How it ended.
            is_failure: Whether every further one would fail like it.
        """
        is_ready = self.remove(member)
        how = describe_end(outcome)
        self._deaths += MAX_DEATHS if is_failure else not is_ready
        what = f"member {member} {how} before it joined the others"
        if is_failure:
            what = f"member {member} did not join the others, which continue without it: it {how}"
        elif self._deaths >= MAX_DEATHS:
            what += f", as {MAX_DEATHS - 1} before it"
        is_last = self._deaths >= MAX_DEATHS
        log(f"{what}; no more are started until you run: lockstep scale" if is_last else what)
