r"""The output of ranks: written to a log per rank, and line by line to the terminal.

    rank 0 ── stdout, stderr ──> runs/NAME/rank-0.log      every byte
                             └─> [0] one line              among those of other ranks

Bytes stay bytes: what is not UTF-8 reaches log and terminal unchanged. A stream is split
into lines like this:

    "one\ntw", then "o\n"       ->  "one", "two"
    "10%\r20%\r30%"             ->  "30%", at most once per second: a progress bar
    "name? ", then nothing      ->  "name?", after 0.3 s: a prompt
    a megabyte without an end   ->  pieces of 64 KiB
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from lockstep.files import create_file, open_or_create
from lockstep.formatting import format_numbered
from lockstep.messages import discard_if_lost, log

__all__ = ["LineSplitter", "RankOutput", "Stream", "close_outputs"]

CHUNK = 1 << 16  # bytes for one system call
MAX_PIPE = 1 << 20  # bytes that a pipe holds, with pages of 64 KiB
MAX_LINE = 1 << 16  # bytes
PROMPT_DELAY = 0.3  # seconds that an unfinished line waits for its end
REFRESH = 1.0  # seconds between two states of a line that is overwritten
LAST_LINES = 20
TRACEBACK = b"Traceback (most recent call last)"
COLOURS = (36, 33, 35, 32, 34, 31)  # of the prefixes, by rank


class LineSplitter:
    """A splitter of one stream into lines; `now` is a time in seconds of any one clock."""

    def __init__(self) -> None:
        self._rest = b""
        self._since = 0.0  # when the rest grew or was last returned
        self._is_continued = False  # whether the beginning of this line was returned already

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Add `data` and return the lines that it completes, without their ends."""
        *finished, rest = (self._rest + data).split(b"\n")
        lines = [_visible(line) for line in finished]
        if lines:
            if self._is_continued and not lines[0]:
                del lines[0]
            self._is_continued = False
        while len(rest) > MAX_LINE:
            lines.append(rest[:MAX_LINE])
            rest = rest[MAX_LINE:]
            self._is_continued = True
        if finished or b"\r" not in rest or not self._rest:
            self._since = now
        self._rest = rest
        return lines

    def take_overdue(self, now: float) -> list[bytes]:
        """Return the unfinished line if it has waited long enough."""
        delay = REFRESH if b"\r" in self._rest else PROMPT_DELAY
        if not self._rest or now - self._since < delay:
            return []
        self._since = now
        return self.take_rest()

    def take_rest(self) -> list[bytes]:
        """Return the unfinished line, such as at the end of the stream."""
        line = _visible(self._rest)
        self._rest = b""
        self._is_continued = self._is_continued or bool(line)
        return [line] if line else []


def _visible(line: bytes) -> bytes:
    """Return what a terminal shows of a line that was overwritten."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


@dataclass
class Stream:
    """One stream of a rank: the ends of its pipe, and where it is shown (None: nowhere)."""

    reading: int
    writing: int
    console: BinaryIO | None
    lines: LineSplitter


class RankOutput:
    """The two streams of one rank, its log, and its last lines.

    Args:
        rank: The rank, for the prefix and its colour.
        log_file: File to write to, or None.
        consoles: Where stdout and stderr are shown; None if they are not.
        prefixed: Whether each line begins with the rank.
        separator: A line to write before appending to an existing log; None if the log must be
            new.

    Raises:
        OSError: The log cannot be opened.
    """

    def __init__(
        self,
        rank: int,
        log_file: Path | None,
        consoles: tuple[BinaryIO | None, BinaryIO | None],
        *,
        prefixed: bool = True,
        separator: str | None = None,
    ) -> None:
        self.log = log_file
        self.last_lines: deque[bytes] = deque(maxlen=LAST_LINES)
        self._rank = rank
        self._prefixed = prefixed
        self._file = None if log_file is None else _open_log(log_file, separator)
        self.streams = [_open_stream(console) for console in consoles]
        self.log_error: str | None = None

    def close_writing_ends(self) -> None:
        """Close this process's copies of the pipes' writing ends, once the rank has them."""
        for stream in self.streams:
            os.close(stream.writing)

    def read(self, stream: Stream) -> bool:
        """Read what is available; return False at the end of the stream."""
        lines = self._take(stream)
        self._show(stream, lines or [])
        return lines is not None

    def _take(self, stream: Stream) -> list[bytes] | None:
        """Return the lines that what is available completes; None at the end of the stream."""
        try:
            data = os.read(stream.reading, CHUNK)
        except BlockingIOError:
            return []
        if not data:
            return None
        self._write_log(data)
        return stream.lines.feed(data, time.monotonic())

    def hide_stderr(self, sentence: str = "") -> None:
        """Stop showing stderr, after an optional last sentence; the log still gets all of it.

        The report that asks for this may arrive before what the rank has written earlier, or after
        its traceback.
        """
        errors = self.streams[1]
        taken = (self._take(errors) for _ in range(MAX_PIPE // CHUNK))
        lines = [line for some in taken for line in some or ()]
        lines += errors.lines.take_rest()
        shown = [*takewhile(lambda line: not line.startswith(TRACEBACK), lines)]
        hidden = lines[len(shown) :]
        self._show(errors, [*shown, *([sentence.encode()] if sentence else [])])
        errors.console = None
        self._show(errors, hidden)

    def show_overdue(self) -> None:
        """Show unfinished lines that have waited long enough."""
        now = time.monotonic()
        for stream in self.streams:
            self._show(stream, stream.lines.take_overdue(now))

    def close(self) -> bool:
        """Read the rest, and close pipes and log; return whether a process holds a pipe."""
        is_held = False
        for stream in self.streams:
            with contextlib.suppress(OSError):
                # No more than a pipe holds: a process that the rank left behind may go on writing.
                is_held |= all(self.read(stream) for _ in range(MAX_PIPE // CHUNK))
            self._show(stream, stream.lines.take_rest())
            os.close(stream.reading)
        if self._file is not None:
            self._file.close()
        return is_held

    def _write_log(self, data: bytes) -> None:
        if self._file is None or self.log_error is not None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self.log_error = f"{self.log} is incomplete: writing to it failed: {error.strerror}"

    def _show(self, stream: Stream, lines: list[bytes]) -> None:
        self.last_lines.extend(lines)
        if stream.console is None or not lines:
            return
        prefix = self._prefix(stream.console)
        try:
            stream.console.write(b"".join(prefix + line + b"\n" for line in lines))
            stream.console.flush()
        except OSError as error:
            if not discard_if_lost(stream.console, error) or error.errno == errno.EPIPE:
                raise
            if error.errno != errno.EIO:  # a closed terminal, which shows no sentence either
                name = "standard output" if stream is self.streams[0] else "standard error"
                rest = "" if self.log is None else "; the logs are complete"
                log(
                    f"{name} cannot be written ({error.strerror}), and is dropped from now on{rest}"
                )

    def _prefix(self, console: BinaryIO) -> bytes:
        if not self._prefixed:
            return b""
        plain = f"[{self._rank}]"
        if not console.isatty() or os.environ.get("NO_COLOR"):
            return f"{plain} ".encode()
        return f"\x1b[{COLOURS[self._rank % len(COLOURS)]}m{plain}\x1b[0m ".encode()


def close_outputs(outputs: Mapping[int, RankOutput], noun: str) -> None:
    """Close the outputs of ranks that have exited, and name those that a process still holds."""
    if held := [rank for rank, output in outputs.items() if output.close()]:
        log(
            f"{format_numbered(noun, held)} ended, but a process started there still runs and "
            "holds the output: its further output is lost"
        )


def _open_log(log_file: Path, separator: str | None) -> BinaryIO:
    if separator is None:
        return os.fdopen(create_file(log_file, os.O_APPEND), "ab", 0)
    file = os.fdopen(open_or_create(log_file, os.O_WRONLY | os.O_APPEND), "ab", 0)
    if os.fstat(file.fileno()).st_size:
        with contextlib.suppress(OSError):  # a full disk, which the next write reports
            file.write(f"\n{separator}\n".encode())
    return file


def _open_stream(console: BinaryIO | None) -> Stream:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    return Stream(reading, writing, console, LineSplitter())
