"""The output forwarder: shows the workers' output, in the thread that waits for them.

A notebook shows the output of a thread under the cell that started the thread. So the thread
that reads the workers' pipes only queues their lines; the caller that waits for a call shows
them, in its own cell, before the call returns. While no caller waits, the reading thread
shows them itself.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, TextIO

from rich.text import Text

from lockstep.launcher.live_region import LiveRegion, is_terminal

__all__ = ["ForwardedStream", "OutputForwarder", "StreamName", "has_display"]

StreamName = Literal["stdout", "stderr"]


class OutputForwarder:
    """Queued output of workers, and the callers that wait for calls."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: deque[tuple[StreamName, str]] = deque()
        self._progress: Sequence[str] | None = None  # lines of a live region that are not drawn yet
        self._live: LiveRegion | LiveLine | None = None
        self._waiting = 0  # waiting callers
        self.received = 0  # pieces of text so far

    def put(self, name: StreamName, text: str) -> None:
        """Queue text for a stream of this process."""
        with self._changed:
            self._lines.append((name, text))
            self.received += 1
            self._changed.notify_all()

    def show_progress(self, lines: Sequence[str]) -> None:
        """Draw the lines of a worker's live region below the output, while a caller waits."""
        with self._changed:
            self._progress = lines
            self._changed.notify_all()

    def wake(self) -> None:
        """Make callers of `wait` check their condition again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, done: Callable[[], bool], deadline: float | None) -> None:
        """Wait until `done` returns True or the deadline, and show output in the meantime."""
        with self._changed:
            self._waiting += 1
        try:
            while self._wait_for_output(done, deadline):
                self._show()
        finally:
            with self._changed:
                self._waiting -= 1
                live = self._live
                self._live = None
            if live is not None:
                live.close()
            self._show()

    def show_if_no_caller_waits(self) -> None:
        """Show queued output, unless a caller waits and will show it."""
        with self._changed:
            if self._waiting:
                return
        self._show()

    def _wait_for_output(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """Sleep until there is output (True), or the wait is over (False)."""
        with self._changed:
            while not self._lines and self._progress is None:
                left = None if deadline is None else deadline - time.monotonic()
                if done() or (left is not None and left <= 0):
                    return False
                self._changed.wait(left)
        return True

    def _show(self) -> None:
        while True:
            try:
                name, text = self._lines.popleft()
            except IndexError:
                break
            if self._live is not None:
                self._live.erase()
            stream = getattr(sys, name)
            stream.write(text)
            stream.flush()
        lines = self._progress
        self._progress = None
        if lines and self._waiting and has_display():
            is_region = is_terminal(sys.stderr)
            self._live = self._live or (LiveRegion if is_region else LiveLine)(sys.stderr)
            self._live.draw(lines)


def has_display() -> bool:
    """Return whether standard error is a terminal or the output of a notebook's cell."""
    return is_terminal(sys.stderr) or "ipykernel" in sys.modules


class LiveLine:
    """The last line of a cell's output in a notebook, which is written again in place.

    Args:
        stream: The output of the cell.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._width = 0

    def draw(self, lines: Sequence[str]) -> None:
        """Write the first two lines of a live region, without their markup, as one line."""
        text = "  ".join(Text.from_markup(line).plain for line in lines[:2])
        self._stream.write(f"\r{text.ljust(self._width)}")
        self._stream.flush()
        self._width = len(text)

    def erase(self) -> None:
        """Erase the line, before something else is written."""
        if self._width:
            self._stream.write(f"\r{' ' * self._width}\r")
            self._stream.flush()
            self._width = 0

    close = erase


class ForwardedStream(io.RawIOBase):
    """A binary stream that passes written data to `forward`, as text."""

    def __init__(self, forward: Callable[[str], None]) -> None:
        super().__init__()
        self._forward = forward

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Forward whole lines; bytes that are not UTF-8 become a replacement character."""
        self._forward(content.decode(errors="replace"))
        return len(content)
