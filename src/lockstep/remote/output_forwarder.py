"""The output forwarder: shows what workers print, in the thread that waits for them.

A notebook puts what a thread prints under the cell that started the thread. So
the thread that reads the workers' pipes only notes their lines; the caller that
waits for an answer shows them, in its own cell, before it returns the answer.
While nobody waits, the reading thread shows them itself.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

__all__ = ["Console", "OutputForwarder"]

Name = Literal["stdout", "stderr"]


class OutputForwarder:
    """Lines that are to be shown, and those who wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: deque[tuple[Name, str]] = deque()
        self._waiting = 0
        self.written = 0  # how many pieces of text came so far

    def put(self, name: Name, text: str) -> None:
        """Note text for a stream of this process."""
        with self._changed:
            self._lines.append((name, text))
            self.written += 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Let those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, done: Callable[[], bool], deadline: float | None) -> None:
        """Wait for `done` or the deadline, and show what comes meanwhile."""
        with self._changed:
            self._waiting += 1
        try:
            while not self._over(done, deadline):
                self._show()
        finally:
            with self._changed:
                self._waiting -= 1
            self._show()

    def show_unless_awaited(self) -> None:
        """Show what is there where nobody waits who would."""
        with self._changed:
            if self._waiting:
                return
        self._show()

    def _over(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """Sleep until there is something to show (False), or the wait is over (True)."""
        with self._changed:
            while not self._lines:
                left = None if deadline is None else deadline - time.monotonic()
                if done() or (left is not None and left <= 0):
                    return True
                self._changed.wait(left)
        return False

    def _show(self) -> None:
        while True:
            try:
                name, text = self._lines.popleft()
            except IndexError:
                return
            stream = getattr(sys, name)
            stream.write(text)
            stream.flush()


class Console(io.RawIOBase):
    """One stream of the output, to which bytes are written."""

    def __init__(self, output: OutputForwarder, name: Name) -> None:
        super().__init__()
        self._output, self._name = output, name

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Note whole lines; what is no UTF-8 is shown as a replacement sign."""
        self._output.put(self._name, content.decode(errors="replace"))
        return len(content)
