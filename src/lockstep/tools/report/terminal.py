"""Text for the terminal, wrapped to its width; unwrapped if the output is not a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.messages import escape_control

__all__ = ["UNLIMITED", "colorize", "print_table", "terminal_width", "wrap"]

UNLIMITED = 10_000  # columns if the output is not a terminal
GAP = 2  # characters between the columns of a table
COLORS = {"red": 31, "green": 32, "yellow": 33}
STYLES = {
    "done": "green",
    "failed": "red",
    "died": "red",
    "stopped": "yellow",
    "still running": "yellow",
}


def terminal_width() -> int:
    """Return the number of columns of standard output."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED


def wrap(sentence: str, indent: str = "", first: str | None = None) -> list[str]:
    """Wrap a sentence to lines; `first` is the indent of the first line, by default `indent`."""
    room = max(terminal_width(), len(indent) + 20)
    first = indent if first is None else first
    sentence = escape_control(sentence)
    return textwrap.wrap(sentence, room, initial_indent=first, subsequent_indent=indent)


def colorize(text: str, color: str) -> str:
    """Return text in a color, if standard output is a terminal and the user allows colors."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[{COLORS[color]}m{text}\033[0m"


def print_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str] = ()
) -> None:
    """Print a table.

    If the terminal is too narrow, the columns in `optional` are left out one after the other;
    if it is still too narrow, each row is printed as a block of lines.

    Args:
        names: The names of the columns.
        rows: The cells of each row.
        optional: The names of the columns that may be left out.
    """
    names, *rows = [list(map(_to_one_line, line)) for line in (names, *rows)]
    kept = list(range(len(names)))
    for name in optional:
        if _table_width(names, rows, kept) > terminal_width() and name in names:
            kept.remove(names.index(name))
    if _table_width(names, rows, kept) > terminal_width():
        _print_blocks(names, rows)
    else:
        _print_columns([names[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _to_one_line(text: str) -> str:
    """Return text without line breaks and control characters."""
    return escape_control(text.replace("\n", " "))


def _table_width(names: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    """Return the width of a table with the columns `kept`."""
    widths = [max(len(line[at]) for line in (names, *rows)) for at in kept]
    return sum(widths) + GAP * (len(kept) - 1)


def _print_columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows as columns."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0),
        header_style="bold",
    )  # fmt: skip
    for name in names:
        table.add_column(Text(name), no_wrap=True)
    for row in rows:
        table.add_row(*(_style_cell(cell) for cell in row))
    _print_trimmed(table)


def _print_blocks(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print each row as a block: its first cell, and below it the other cells with their names."""
    indent = 2 + max(map(len, names)) + GAP
    for row in rows:
        _print_trimmed(Text(row[0], style="bold"))
        for name, cell in zip(names[1:], row[1:], strict=True):
            if cell:
                lines = wrap(cell, " " * indent, f"  {name:<{indent - 2}}")
                print("\n".join(lines))


def _style_cell(cell: str) -> Text:
    """Return a cell, in color if it is the state of a run."""
    return Text(cell, style=STYLES.get(cell, ""))


def _print_trimmed(what: Table | Text) -> None:
    """Print without trailing spaces."""
    console = Console(width=terminal_width(), highlight=False)
    with console.capture() as drawn:
        console.print(what)
    for line in drawn.get().splitlines():
        print(line.rstrip())
