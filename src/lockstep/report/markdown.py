r"""Markdown in which text stays text: nothing in it becomes a tag, a link or another cell.

text("<b> a|b")       &lt;b&gt; a\|b      within a line or a cell
block("a\nb")         a fenced block      literal, several lines
table(names, rows)    | a | b |           of texts
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lockstep.messages import escape_control

__all__ = ["block", "table", "text"]

ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
ACTIVE = re.compile(r"[&<>\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")  # not "held_out"


def text(value: str) -> str:
    """Return text for a line or a cell of a table; line breaks become spaces."""
    line = escape_control(value.replace("\n", " ")).strip()
    return ACTIVE.sub(lambda sign: ENTITIES.get(sign[0], f"\\{sign[0]}"), line)


def block(value: str) -> list[str]:
    """Return text as the lines of a fenced block, which it cannot end."""
    longest = max(map(len, re.findall("`+", value)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *escape_control(value).split("\n"), fence]


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table of texts."""
    head, *body = (f"| {' | '.join(map(text, row))} |" for row in (names, *rows))
    return [head, "|---" * len(names) + "|", *body]
