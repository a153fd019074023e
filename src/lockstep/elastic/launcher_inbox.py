"""Messages of the launcher to a member of an elastic run on several hosts.

On one host, the backend notices at once when a rank dies. Over a network it may not: a host that
lost its power sends nothing. The launcher learns it from its own connections, and says "lost":

    launcher ── "lost" ──> inbox, a thread ── shuts the group's connections down
                              │                    └──> the rank's collective call raises
                              └── queue ──> the rank, which waits for a decision
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from lockstep.launcher.rank_process import receive_from_launcher
from lockstep.launcher.world import close_world_connections

__all__ = ["LauncherInbox"]


class LauncherInbox:
    """Receives the launcher's messages on a thread of its own.

    Attributes:
        lost_round: The latest round of which a member is known to be lost; -1 for none.
    """

    def __init__(self) -> None:
        self.lost_round = -1
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._current = -1
        threading.Thread(target=self._receive, name="lockstep-inbox", daemon=True).start()

    def receive(self, timeout: float | None) -> tuple[dict[str, Any], list[int]] | None:
        """As `receive_from_launcher`, without the messages "lost"."""
        try:
            return self._messages.get(timeout is None or timeout > 0, timeout), []
        except queue.Empty:
            return None

    def enter(self, number: int) -> None:
        """Shut the connections of round `number` down, which now exist, as soon as it is over."""
        with self._lock:
            self._current = number
            if self.lost_round >= number:
                close_world_connections()

    def _receive(self) -> None:
        while (received := receive_from_launcher(None)) is not None:
            message = received[0]
            if message["kind"] == "lost":
                with self._lock:
                    self.lost_round = max(self.lost_round, int(message["round"]))
                    if self._current <= self.lost_round:
                        close_world_connections()
            else:
                self._messages.put(message)
