"""The transfer of the state to the processes that replace the members of a round.

    launcher ──"transfer_state"──> one member for each part ──"transferred"──> launcher
                                       └ killed: the next one that can write this part

`training/last_safe_state.py` describes what a member writes, and when it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.elastic.round_plan import RestartTransfer
from lockstep.launcher.channel import Message

__all__ = ["StateTransfer"]

TIMEOUT = 120.0  # seconds that members have to write their state


class StateTransfer:
    """A hand-over in progress.

    Args:
        plan: The members that can write each part.
        folder: The folder that is written to.
        send: Sends a message to a member.

    Attributes:
        folder: The folder that is written to.
    """

    def __init__(
        self, plan: RestartTransfer, folder: Path, send: Callable[[int, Message], None]
    ) -> None:
        self.folder = folder
        self._plan, self._send = plan, send
        self._deadline = time.monotonic() + TIMEOUT
        self._writing: dict[int, int] = {}  # for each part, the member that writes it
        self._written: set[int] = set()
        for part, writers in enumerate(plan.writers):
            self._ask(part, writers[0])

    def _ask(self, part: int, member: int) -> None:
        self._writing[part] = member
        message = {
            "kind": "transfer_state",
            "folder": str(self.folder),
            "operation": self._plan.operation,
            "commit": self._plan.commit,
        }
        self._send(member, message)

    @property
    def writers(self) -> list[int]:
        """The members that are writing the state."""
        return sorted(self._writing.values())

    def note_written(self, member: int) -> None:
        """Record that a member has written its part."""
        self._written.add(member)

    def follow(self, alive: Sequence[int]) -> bool | None:
        """Ask another member for each part whose writer was killed.

        Args:
            alive: The running members.

        Returns:
            Whether the state is complete; None while it is being written.
        """
        for part, member in self._writing.items():
            if member not in alive and member not in self._written:
                others = [other for other in self._plan.writers[part] if other in alive]
                if not others:
                    return False
                self._ask(part, others[0])
        if self._written.issuperset(self._writing.values()):
            return True
        return False if time.monotonic() >= self._deadline else None
