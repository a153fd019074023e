"""The restarts of an elastic run, in which new processes replace all others."""

from __future__ import annotations

from collections.abc import Collection

from lockstep.elastic.current_round import CurrentRound
from lockstep.elastic.restart_source import RestartSource, StateFolder

__all__ = ["MAX_FRUITLESS", "Restarts"]

MAX_FRUITLESS = 5  # restarts in a row that saved nothing


class Restarts:
    """The restarts of one run.

    Args:
        states: The states from which new processes continue.

    Attributes:
        states: The states.
        next: From what the next processes continue, once the old ones have exited; None if no
            restart is planned.
    """

    def __init__(self, states: StateFolder) -> None:
        self.states = states
        self.next: RestartSource | None = None
        self._interrupted: float | None = None  # in Unix time; until new processes train again
        self._resumed: set[int] = set()

    def plan(self, ended: CurrentRound, joined: list[int]) -> bool:
        """Plan to replace the members of a round; return False if that has not helped so far."""
        if self.states.count_fruitless() > MAX_FRUITLESS:
            return False
        end = ended.describe_end()
        self._interrupted = self._interrupted or end["noticed"]
        self.next = RestartSource(
            **end,
            interrupted=self._interrupted,
            joined=joined,
            # Including members that exited by themselves after they had handed over their state.
            left=[member for member in ended.members if member not in ended.lost],
            writers=self.states.writers,
            state=self.states.transferred,
        )
        return True

    def begin(self) -> None:
        """Begin the planned restart."""
        self.next = None
        self._resumed.clear()

    def note_resumed(self, member: int, members: Collection[int], *, is_busy: bool) -> None:
        """Note that a new process has read its state, which is removed after the last one.

        Args:
            member: The process.
            members: The members of the round.
            is_busy: Whether a state for other processes is being written or planned.
        """
        self._resumed.add(member)
        self._interrupted = None
        if self._resumed.issuperset(members) and not is_busy:
            self.states.discard()
