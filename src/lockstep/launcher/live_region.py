r"""A region at the end of the terminal's output that is redrawn in place.

    what the program printed
    epoch 3  ━━━━━━━─────  31/51         the region; the cursor is in the line below it
    loss 0.4000   1,920 samples/s

When the program prints, the region is erased and the output is written unchanged; the next drawing
puts the region below it. Nothing is drawn while the last line is unfinished (a prompt, another
progress bar). Tracebacks and debuggers therefore need no special treatment, no thread draws, and
the cursor is never hidden, so the terminal stays usable even if the process is killed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from lockstep.messages import discard_if_lost, escape_control

__all__ = ["LiveRegion", "is_terminal"]

WITHOUT_UNICODE = str.maketrans("━─", "=-")


class LiveRegion:
    """The region of a terminal.

    Standard output and error, and the handlers of `logging`, are replaced until `close`, which
    also runs at exit.

    Args:
        stream: The stream of the terminal; nothing is drawn if it is none.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, highlight=False)
        self._height = 0
        self._owner = os.getpid() if is_terminal(stream) else 0  # the process that draws
        self.is_line_open = False
        """Whether the last line of the program's output is unfinished."""
        self._replaced: list[tuple[str, TextIO, OutputAbove]] = []
        for name in ("stdout", "stderr"):
            output = getattr(sys, name)
            if is_terminal(output):
                above = OutputAbove(output, self)
                setattr(sys, name, above)
                self._replaced.append((name, output, above))
                _redirect_logging(output, above)
        atexit.register(self.close)

    def draw(self, lines: Sequence[str]) -> None:
        """Replace the content, unless the program's last line is unfinished.

        Args:
            lines: Lines with rich's markup, which are cut off at the edge of the terminal.
        """
        if self.is_line_open or os.getpid() != self._owner:
            return
        shown = lines[: max(1, self._console.height - 1)]
        if not self._console.encoding.startswith("utf"):
            shown = [line.translate(WITHOUT_UNICODE) for line in shown]
        width = self._console.width - 1
        with self._console.capture() as capture:
            for line in shown:
                text = Text.from_markup(escape_control(line))
                self._console.print(text, no_wrap=True, overflow="crop", width=width)
        self._write(self._erasure() + capture.get())
        self._height = len(shown)

    def erase(self) -> None:
        """Erase the region, before something else is written."""
        if self._height and os.getpid() == self._owner:
            self._write(self._erasure())
            self._height = 0

    def print(self, line: str) -> None:
        """Print a permanent line above the region."""
        self.erase()
        self._write("\n" * self.is_line_open + line + "\n")
        self.is_line_open = False

    def close(self) -> None:
        """Erase the region and restore the streams."""
        if os.getpid() != self._owner:
            return
        self.erase()
        self._owner = 0
        atexit.unregister(self.close)
        for name, output, above in self._replaced:
            if getattr(sys, name) is above:
                setattr(sys, name, output)
            _redirect_logging(above, output)

    def _erasure(self) -> str:
        return f"\r\x1b[{self._height}A\x1b[J" if self._height else ""

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:  # a closed terminal
            discard_if_lost(self._stream, error)


class OutputAbove:
    """A stream of the program, of text or of bytes, whose output appears above the region."""

    def __init__(self, stream: Any, region: LiveRegion) -> None:
        self._stream = stream
        self._region = region

    def write(self, text: Any) -> int:
        """Erase the region and write the text to the stream."""
        if text:
            self._region.erase()
            self._region.is_line_open = text[-1:] not in ("\n", b"\n")
        return int(self._stream.write(text))

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> OutputAbove:
        """The stream of bytes below."""
        return OutputAbove(self._stream.buffer, self._region)

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
