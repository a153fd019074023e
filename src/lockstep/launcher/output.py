"""What ranks print: into a log each, and line by line onto the terminal.

    rank 0 ── stdout, stderr ──> runs/NAME/rank-0.log      every byte
                             └─> [0] a line                 between those of other ranks

Bytes stay bytes: what is no UTF-8 reaches log and terminal as it is.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lockstep.files import create_file
from lockstep.launcher.lines import Lines

__all__ = ["Output", "Stream"]

CHUNK = 1 << 16
LAST_LINES = 20
COLOURS = (36, 33, 35, 32, 34, 31)  # of the prefixes, rank by rank


@dataclass
class Stream:
    """One stream of a rank: the pipe it comes through, where it is shown (or None)."""

    reading: int
    writing: int
    console: BinaryIO | None
    lines: Lines


class Output:
    """The two streams of one rank, its log, and its last lines.

    `consoles` are where stdout and stderr are shown, None where they are not.
    """

    def __init__(
        self,
        rank: int,
        log: Path | None,
        consoles: tuple[BinaryIO | None, BinaryIO | None],
        *,
        prefixed: bool = True,
    ) -> None:
        self.log = log
        self.last: deque[bytes] = deque(maxlen=LAST_LINES)
        self._rank = rank
        self._prefixed = prefixed
        self._file = None if log is None else os.fdopen(create_file(log, os.O_APPEND), "ab", 0)
        self.streams = [_stream(console) for console in consoles]
        self.complaint: str | None = None

    def started(self) -> None:
        """Close this process's copies of the ends that the rank writes to."""
        for stream in self.streams:
            os.close(stream.writing)

    def read(self, stream: Stream) -> bool:
        """Take in what is there; False at the end of the stream."""
        try:
            data = os.read(stream.reading, CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._write_log(data)
        self._show(stream, stream.lines.feed(data, time.monotonic()))
        return True

    def hush(self, sentence: str) -> None:
        """Show one sentence in place of what comes on stderr; the log still gets all."""
        errors = self.streams[1]
        self._show(errors, [*errors.lines.rest(), sentence.encode()])
        errors.console = None

    def tick(self) -> None:
        """Show unfinished lines that have waited long enough."""
        now = time.monotonic()
        for stream in self.streams:
            self._show(stream, stream.lines.due(now))

    def close(self) -> None:
        """Take in the rest and let go of pipes and log."""
        for stream in self.streams:
            with contextlib.suppress(OSError):
                while data := os.read(stream.reading, CHUNK):
                    self._write_log(data)
                    self._show(stream, stream.lines.feed(data, time.monotonic()))
            self._show(stream, stream.lines.rest())
            os.close(stream.reading)
        if self._file is not None:
            self._file.close()

    def _write_log(self, data: bytes) -> None:
        if self._file is None or self.complaint is not None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self.complaint = f"{self.log} cannot be written any more: {error.strerror}"

    def _show(self, stream: Stream, lines: list[bytes]) -> None:
        self.last.extend(lines)
        if stream.console is None or not lines:
            return
        prefix = self._prefix(stream.console)
        stream.console.write(b"".join(prefix + line + b"\n" for line in lines))
        stream.console.flush()

    def _prefix(self, console: BinaryIO) -> bytes:
        if not self._prefixed:
            return b""
        plain = f"[{self._rank}]"
        if not console.isatty() or os.environ.get("NO_COLOR"):
            return f"{plain} ".encode()
        return f"\x1b[{COLOURS[self._rank % len(COLOURS)]}m{plain}\x1b[0m ".encode()


def _stream(console: BinaryIO | None) -> Stream:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    return Stream(reading, writing, console, Lines())
