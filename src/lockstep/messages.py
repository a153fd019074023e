r"""Messages for the person at the terminal, with control characters made visible.

Names, paths and messages may come from another process, a record or a file's header. Printed
as they are, they could move the cursor, change colours or hide earlier output. With
`escape_control`, "\x1b[2J" is printed as the text "\x1b[2J".
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from typing import IO, Any

__all__ = ["JSON_HELP", "discard_if_lost", "escape_control", "say"]

JSON_HELP = "Print one JSON object as the last line of stdout; text goes to stderr."
"""The help text of `--json` in every command that measures or compares one thing."""

# C0 and C1 controls except newline and tab, line separators, marks that change the direction
# of text, halves of surrogate pairs, and what XML forbids.
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    r"\ud800-\udfff\ufeff\ufffe\uffff]"
)


def escape_control(text: str) -> str:
    r"""Return `text` with control characters as escapes such as "\x1b"; newlines and tabs stay."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(sentence: str) -> None:
    """Print one sentence on standard error; do nothing if it is closed or its reader is gone."""
    if sys.stderr is None:  # closed before Python started; print would write to standard output
        return
    try:
        # One call, so that the sentences of two threads do not share a line.
        print(f"lockstep: {escape_control(sentence)}\n", end="", file=sys.stderr, flush=True)
    except OSError as error:  # a closed terminal, a full disk
        discard_if_lost(sys.stderr, error)


def discard_if_lost(stream: IO[Any], error: OSError) -> bool:
    """Discard what is written to `stream` from now on if its reader or terminal is gone.

    Otherwise the interpreter fails at exit, with another exit status, when it flushes the stream.

    Args:
        stream: The stream.
        error: The error that writing to it raised.

    Returns:
        Whether the reader or terminal is gone.
    """
    if error.errno not in (errno.EPIPE, errno.EIO):
        return False
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    return True
