"""Tables on the terminal; whole, without folding, where the output is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_table"]

WIDE = 1000  # columns where the output is no terminal
STYLES = {"done": "green", "failed": "red", "died": "red", "still running": "yellow"}


def print_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text under their names, on the standard output."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
    with console.capture() as drawn:
        console.print(table)
    for line in drawn.get().splitlines():
        print(line.rstrip())
