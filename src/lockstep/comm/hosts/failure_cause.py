"""The cause of a failure, on which the ranks of a group across hosts agree in their store."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

__all__ = ["ANSWER_TIMEOUT", "FailureCause"]

KEY = "lockstep/cause"
ANSWER_TIMEOUT = 1.0  # seconds; the store may be on a host that has vanished


class FailureCause:
    """The cause that the first rank has written.

    Args:
        store: The store of the group.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._is_written = False
        self._asking = threading.Thread()

    def agree(self, reason: str) -> str:
        """Return the cause that another rank has written, or else write this reason."""
        causes = [reason]

        def ask() -> None:
            with suppress(RuntimeError):
                causes.append(self._store.compare_set(KEY, "", reason).decode() or reason)

        self._start(ask).join(ANSWER_TIMEOUT)
        return causes[-1]

    def is_written(self) -> bool:
        """Return whether the store had a cause when it was last asked; ask again."""

        def ask() -> None:
            with suppress(RuntimeError):
                self._is_written = self._store.check([KEY])

        if not self._asking.is_alive():
            self._asking = self._start(ask)
        return self._is_written

    def _start(self, ask: Any) -> threading.Thread:
        thread = threading.Thread(target=ask, name="lockstep-cause", daemon=True)
        thread.start()
        return thread
