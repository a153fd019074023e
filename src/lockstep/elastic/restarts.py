"""The restarts of an elastic run, in which new processes replace all others."""

from __future__ import annotations

from pathlib import Path

from lockstep.elastic.current_round import CurrentRound
from lockstep.elastic.restart_source import RestartSource
from lockstep.launcher.run_folder import CHECKPOINTS

__all__ = ["MAX_FRUITLESS", "Restarts"]

MAX_FRUITLESS = 5  # restarts in a row that saved nothing


class Restarts:
    """The restarts of one run.

    Args:
        folder: The run's folder, with its checkpoints; None if it has none.

    Attributes:
        next: From what the next processes continue, once the old ones have exited; None if no
            restart is planned.
    """

    def __init__(self, folder: Path | None) -> None:
        self.next: RestartSource | None = None
        self._interrupted: float | None = None  # in Unix time; until new processes train again
        self._folder, self._fruitless = folder, 0
        self._known = self._list_checkpoints()

    def plan(self, ended: CurrentRound, joined: list[int]) -> bool:
        """Plan to replace the members of a round; return False if that has not helped so far."""
        saved = self._list_checkpoints()
        self._fruitless = 1 if saved and saved != self._known else self._fruitless + 1
        self._known = saved
        if self._fruitless > MAX_FRUITLESS:
            return False
        end = ended.describe_end()
        self._interrupted = self._interrupted or end["noticed"]
        self.next = RestartSource(
            **end,
            interrupted=self._interrupted,
            joined=joined,
            left=[member for member in ended.members if member not in ended.lost],
        )
        return True

    def begin(self) -> None:
        """Begin the planned restart."""
        self.next = None

    def note_resumed(self) -> None:
        """Note that a new process continues to train."""
        self._interrupted = None

    def _list_checkpoints(self) -> set[str]:
        folder = None if self._folder is None else self._folder / CHECKPOINTS
        return set() if folder is None else {path.name for path in folder.glob("step-*")}
