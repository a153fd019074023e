"""The chain of a record: each line holds a hash of itself and of the line before it.

    {"kind":"run",...,"chain":"5f0c..."}      hash of this line, seeded with 0
    {"kind":"step",...,"chain":"91ab..."}     hash of this line, seeded with 5f0c...

The hash of a line that was edited, inserted or moved, or that follows a removed line, no longer
matches. The hash is not a signature: a record whose hashes were all computed anew passes the check.
`find_missing_end` detects lines that are missing at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import orjson
import xxhash

from lockstep.errors import UsageError
from lockstep.formatting import format_quantity
from lockstep.launcher.run_folder import read_description

__all__ = ["ChainCheck", "add_link", "find_last_link", "find_missing_end"]

MARK = b',"chain":"'
TAIL = len(MARK) + 16 + len(b'"}\n')  # the size in bytes of a link, at the end of a line
STEPS = re.compile(r"step-(\d+)(?:-\d+)?")


def add_link(line: bytes, previous: int) -> tuple[bytes, int]:
    """Return a line with its link and a newline, and the link.

    Args:
        line: A JSON object with at least one entry, without a newline.
        previous: The link of the line before it; 0 for the first one.
    """
    body = line[:-1]
    link = xxhash.xxh3_64_intdigest(body, previous)
    return b'%s%s%016x"}\n' % (body, MARK, link), link


def find_last_link(lines: Sequence[bytes]) -> int:
    """Return the link of the last complete line; 0 if no line has one."""
    links = (_read_link(line.rstrip(b"\n") + b"\n") for line in reversed(lines))
    return next((link for link in links if link is not None), 0)


def _read_link(line: bytes) -> int | None:
    if line[-TAIL : 10 - TAIL] != MARK:
        return None
    try:
        return int(line[10 - TAIL : -3], 16)
    except ValueError:
        return None


class ChainCheck:
    """A check of the lines of a record, in their order.

    Lines before the first line with a link were written by an older version and are not checked.
    Lines that are not JSON are skipped: a process was killed while it wrote them.
    """

    def __init__(self) -> None:
        self.breaks: list[int] = []
        """The numbers of the lines, from 1, that do not follow from the line before them."""
        self._previous: int | None = None
        self._count = 0

    def check(self, lines: Iterable[bytes]) -> None:
        """Check the next lines; only the last one of a record may lack its newline."""
        for line in lines:
            self._count += 1
            link = _read_link(line if line.endswith(b"\n") else line + b"\n")
            if link is None:
                if self._previous is not None and _is_object(line):
                    self.breaks.append(self._count)
                continue
            body = line[:-TAIL] if line.endswith(b"\n") else line[: 1 - TAIL]
            if xxhash.xxh3_64_intdigest(body, self._previous or 0) != link:
                self.breaks.append(self._count)
            self._previous = link

    def describe(self) -> str:
        """Return one sentence about the breaks; empty if there are none."""
        if not self.breaks:
            return ""
        first, *others = self.breaks
        more = f", and {format_quantity(len(others), 'later line')} likewise" if others else ""
        return (
            f"The record was changed after it was written: line {first} does not follow from the "
            f"line before it{more}; lines were edited, removed, inserted or moved."
        )


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def find_missing_end(folder: Path, last: float) -> str:
    """Return a sentence about lines that are missing at the end of a record; "" if none are known.

    Args:
        folder: The folder of a run that is not running and whose record has no line "end".
        last: The number of the last step in the record; -1 if it has none.
    """
    latest = max(_saved_steps(folder), default=0)
    if latest > last + 1:
        steps = format_quantity(last + 1, "step")
        return (
            f"Lines are missing at the end of the record: it has {steps}, and the run a checkpoint "
            f"after step {latest}."
        )
    try:
        launched = read_description(folder)
    except UsageError:  # damaged
        launched = None
    if launched is not None and launched.exit_status == 0:
        return (
            "Lines are missing at the end of the record: the launch ended with exit status 0, and "
            "such a run writes a last line."
        )
    return ""


def _saved_steps(folder: Path) -> Iterator[int]:
    for path in folder.glob("checkpoints/step-*"):
        if (match := STEPS.fullmatch(path.name)) is not None:
            yield int(match[1])
