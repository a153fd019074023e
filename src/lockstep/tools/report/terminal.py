"""Text for the terminal, wrapped to its width; unwrapped if the output is not a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.messages import escape_control

__all__ = ["UNLIMITED", "print_sentences", "print_table", "terminal_width", "wrap"]

UNLIMITED = 10_000  # columns if the output is not a terminal
GAP = 2  # characters between the columns of a table
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


def print_sentences(*sentences: str) -> None:
    """Print sentences, each on lines of its own."""
    for sentence in sentences:
        print("\n".join(wrap(sentence)))


def print_table(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    optional: Sequence[str] = (),
    numbers: Sequence[str] = (),
) -> None:
    """Print a table.

    If the terminal is too narrow, the columns in `optional` are left out one after the other;
    if it is still too narrow, all cells but the first of a row are wrapped.

    Args:
        names: The names of the columns.
        rows: The cells of each row.
        optional: The names of the columns that may be left out.
        numbers: The names of the columns that are aligned to the right.
    """
    columns = [list(map(_to_one_line, column)) for column in zip(names, *rows, strict=True)]
    for name in optional:
        width = sum(max(map(len, column)) + GAP for column in columns) - GAP
        if width > terminal_width():
            columns = [column for column in columns if column[0] != name]
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0),
        header_style="bold",
    )  # fmt: skip
    for number, (name, *_) in enumerate(columns):  # the first cell is often a name to copy
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        table.add_column(Text(name), justify=justify, overflow="fold", no_wrap=number == 0)
    for row in list(zip(*columns, strict=True))[1:]:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    console = Console(width=terminal_width(), highlight=False)
    with console.capture() as drawn:
        console.print(table)
    for line in drawn.get().splitlines():
        print(line.rstrip())


def _to_one_line(text: str) -> str:
    """Return text without line breaks and control characters."""
    return escape_control(text.replace("\n", " "))
