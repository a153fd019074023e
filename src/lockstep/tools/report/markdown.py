r"""Markdown from texts whose own markup is escaped, so that it forms no tag, link or cell.

escape_markdown("<b> a|b")      &lt;b&gt; a\|b      within a line or a cell
fenced_block("a\nb")            a fenced block      several literal lines
markdown_table(names, rows)     | a | b |           a table of texts
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lockstep.messages import escape_control

__all__ = ["escape_markdown", "fenced_block", "markdown_table"]

ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
ACTIVE = re.compile(r"[&<>\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")  # not "held_out"
LINK = re.compile(r"(:/)(?=/)|(\bwww)(?=\.)", re.IGNORECASE)  # GitHub links addresses in plain text
BLOCK = re.compile(r"^([#+=:-]+(?=\s|$)|\d+(?=[.)](?:\s|$)))")  # a heading, a list or a rule


def escape_markdown(value: str) -> str:
    """Escape a text for a line or a cell of a table; line breaks become spaces."""
    line = escape_control(value.replace("\n", " ")).strip()
    line = ACTIVE.sub(lambda sign: ENTITIES.get(sign[0], f"\\{sign[0]}"), line)
    line = LINK.sub(r"\g<0>\\", line)
    return BLOCK.sub(lambda mark: mark[0] + "\\" if mark[0].isdigit() else "\\" + mark[0], line)


def fenced_block(value: str) -> list[str]:
    """Return the lines of a fenced block whose fence is longer than any in the text."""
    longest = max(map(len, re.findall("`+", value)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *escape_control(value).split("\n"), fence]


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; names and cells are escaped."""
    head, *body = (f"| {' | '.join(map(escape_markdown, row))} |" for row in (names, *rows))
    return [head, "|---" * len(names) + "|", *body]
