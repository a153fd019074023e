r"""A region at the end of the terminal's output that is redrawn in place.

    what the program printed
    epoch 3  ━━━━━━━─────  31/51         the region; the cursor is in the line below it
    loss 0.4000   1,920 samples/s

When the program prints, the region is erased and the output is written unchanged; the next drawing
puts the region below it. Nothing is drawn while the last line is unfinished (a prompt, another
progress bar). Tracebacks and debuggers therefore need no special treatment, and no thread draws.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, RenderableType

__all__ = ["LiveRegion", "is_terminal"]


class LiveRegion:
    """The region of a terminal.

    Standard output and error, and the handlers of `logging`, are replaced until `close`, which
    also runs at exit.

    Args:
        console: The console of the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._stream = console, console.file
        self._height = 0
        self._owner = os.getpid()
        self._is_closed = False
        self.is_line_open = False
        """Whether the last line of the program's output is unfinished."""
        self._replaced: list[tuple[TextIO, OutputAbove]] = []
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if is_terminal(stream):
                above = OutputAbove(stream, self)
                setattr(sys, name, above)
                self._replaced.append((stream, above))
        for stream, above in self._replaced:
            _redirect_logging(stream, above)
        atexit.register(self.close)

    def draw(self, content: RenderableType) -> None:
        """Replace the content, unless the program's last line is unfinished."""
        if self._is_closed or self.is_line_open or os.getpid() != self._owner:
            return
        lines = self._render(content).splitlines(keepends=True)[: max(1, self._console.height - 1)]
        self._write(self._erasure() + "".join(lines))
        self._height = len(lines)

    def print(self, line: RenderableType) -> None:
        """Print a permanent line above the region."""
        self.erase()
        self._write("\n" * self.is_line_open + self._render(line))
        self.is_line_open = False

    def erase(self) -> None:
        """Erase the region, before something else is written."""
        if self._height and os.getpid() == self._owner:
            self._write(self._erasure())
            self._height = 0

    def close(self) -> None:
        """Erase the region and restore the streams."""
        if self._is_closed or os.getpid() != self._owner:
            return
        self.erase()
        self._is_closed = True
        atexit.unregister(self.close)
        for stream, above in self._replaced:
            for name in ("stdout", "stderr"):
                if getattr(sys, name) is above:
                    setattr(sys, name, stream)
            _redirect_logging(above, stream)

    def _render(self, content: RenderableType) -> str:
        with self._console.capture() as capture:
            self._console.print(content)
        return capture.get()

    def _erasure(self) -> str:
        return f"\r\x1b[{self._height}A\x1b[J" if self._height else ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class OutputAbove:
    """A stream of the program whose output appears above the region."""

    def __init__(self, stream: TextIO, region: LiveRegion) -> None:
        self._stream, self._region = stream, region

    def write(self, text: str) -> int:
        """Erase the region and write the text to the stream."""
        if text:
            self._region.erase()
            self._region.is_line_open = not text.endswith("\n")
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the stream."""
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream."""
        return getattr(self._stream, name)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a region can be drawn on `stream`."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # a closed stream
        return False


def _redirect_logging(old: Any, new: Any) -> None:
    """Replace a stream in the handlers of `logging`."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
