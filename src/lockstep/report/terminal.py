"""Text on the terminal, fitted to its width; whole, without folding, where there is none."""

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

__all__ = ["folded", "painted", "print_table", "width"]

WIDE = 10_000  # columns where the output is no terminal
GAP = 2  # columns between those of a table
COLOURS = {"red": 31, "green": 32, "yellow": 33}
STYLES = {"done": "green", "failed": "red", "died": "red", "still running": "yellow"}


def width() -> int:
    """Return the columns that there are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE


def folded(sentence: str, indent: str = "", first: str | None = None) -> list[str]:
    """Return a sentence as lines, folded between words; `first` is the first line's indent."""
    room = max(width(), len(indent) + 20)
    first = indent if first is None else first
    sentence = escape_control(sentence)
    return textwrap.wrap(sentence, room, initial_indent=first, subsequent_indent=indent)


def painted(text: str, colour: str) -> str:
    """Return text in a colour, where the terminal shows colours and the user wants them."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[{COLOURS[colour]}m{text}\033[0m"


def print_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str] = ()
) -> None:
    """Print rows of text under their names.

    Where the terminal is too narrow the columns in `spare` are left out, in that
    order; where that does not suffice each row becomes a block of lines.
    """
    names, *rows = [list(map(one_line, line)) for line in (names, *rows)]
    kept = list(range(len(names)))
    for name in spare:
        if needed(names, rows, kept) > width() and name in names:
            kept.remove(names.index(name))
    if needed(names, rows, kept) > width():
        print_blocks(names, rows)
    else:
        print_columns([names[at] for at in kept], [[row[at] for at in kept] for row in rows])


def one_line(text: str) -> str:
    """Return text that stays on its line."""
    return escape_control(text.replace("\n", " "))


def needed(names: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    """Return the columns that a table needs."""
    widths = [max(len(line[at]) for line in (names, *rows)) for at in kept]
    return sum(widths) + GAP * (len(kept) - 1)


def print_columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0),
        header_style="bold",
    )  # fmt: skip
    for name in names:
        table.add_column(Text(name), no_wrap=True)
    for row in rows:
        table.add_row(*(styled(cell) for cell in row))
    show(table)


def print_blocks(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print each row as a block: its first cell, and below it the others by name."""
    indent = 2 + max(map(len, names)) + GAP
    for row in rows:
        show(Text(row[0], style="bold"))
        for name, cell in zip(names[1:], row[1:], strict=True):
            if cell:
                lines = folded(cell, " " * indent, f"  {name:<{indent - 2}}")
                print("\n".join(lines))


def styled(cell: str) -> Text:
    """Return a cell in its colour; a state has one."""
    return Text(cell, style=STYLES.get(cell, ""))


def show(what: Table | Text) -> None:
    """Print, without the spaces at the ends of lines."""
    console = Console(width=width(), highlight=False)
    with console.capture() as drawn:
        console.print(what)
    for line in drawn.get().splitlines():
        print(line.rstrip())
