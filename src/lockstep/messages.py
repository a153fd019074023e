r"""Messages for the person at the terminal, with control characters made visible.

Names, paths and messages may come from another process, a record or a file's header. Printed
as they are, they could move the cursor, change colours or hide earlier output. With
`escape_control`, "\x1b[2J" is printed as the text "\x1b[2J".
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from typing import IO, Any

__all__ = [
    "discard_if_lost",
    "escape_control",
    "keep_printing",
    "log",
    "open_missing_streams",
]

# C0 and C1 controls except newline and tab, line separators, marks that change the direction
# of text, halves of surrogate pairs, and what XML forbids.
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    r"\ud800-\udfff\ufeff\ufffe\uffff]"
)


LOST = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors after which nothing can be written to a standard stream."""


def escape_control(text: str) -> str:
    r"""Return `text` with control characters as escapes such as "\x1b"; newlines and tabs stay."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def log(sentence: str) -> None:
    """Print one sentence on standard error; do nothing if it is closed or its reader is gone."""
    if sys.stderr is None:  # closed before Python started; print would write to standard output
        return
    try:
        # One call, so that the sentences of two threads do not share a line.
        print(f"lockstep: {escape_control(sentence)}\n", end="", file=sys.stderr, flush=True)
    except OSError as error:  # a closed terminal, a full disk
        discard_if_lost(sys.stderr, error)


class _LossyStream(io.TextIOWrapper):
    """A stream that drops what it cannot write, unless the reader of a pipe has exited."""

    def write(self, text: str) -> int:
        """Write to the stream."""
        try:
            return super().write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            super().flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError) or not discard_if_lost(self, error):
            raise error


def keep_printing() -> None:
    """Let no message on standard error end a command, because its terminal or disk is lost."""
    before = sys.stderr
    is_own = sys.__stderr__ is before
    if before is not None and is_own:
        file = open(before.fileno(), "wb", closefd=False)  # noqa: SIM115
        sys.stderr = _LossyStream(file, before.encoding, before.errors, line_buffering=True)


def open_missing_streams() -> None:
    """Open the standard streams that are closed: nothing to read, and what is printed is dropped.

    Otherwise the files that are opened next get their numbers, and what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        file: str | int = os.devnull  # if another file has the number already
        try:
            os.fstat(number)
        except OSError:
            file = os.open(os.devnull, os.O_RDWR)  # gets this number, the lowest free one
            os.set_inheritable(file, True)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            is_new = file == os.devnull
            stream = open(file, mode, encoding="utf-8", errors="replace", closefd=is_new)  # noqa: SIM115
            setattr(sys, name, stream)


def discard_if_lost(stream: IO[Any], error: OSError) -> bool:
    """Discard what is written to `stream` from now on if nothing can be written to it.

    That is so if its reader or terminal is gone, or if its disk is full.

    Otherwise the interpreter fails at exit, with another exit status, when it flushes the stream.

    Args:
        stream: The stream.
        error: The error that writing to it raised.

    Returns:
        Whether nothing can be written to it.
    """
    if error.errno not in LOST:
        return False
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    return True
