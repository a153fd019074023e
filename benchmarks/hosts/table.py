"""The tables of the benchmark of hosts: medians, their spread, ratios and bytes per host."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

__all__ = ["call_lines", "train_lines"]

WIDTHS = (24, 11, 11, 11, 9, 14)


def call_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of one placement: a block per size."""
    lines = [_line("contender", "median", "p10", "p90", "of gloo", "sent / size")]
    for size in dict.fromkeys(row["size"] for row in rows):
        lines.append(f"{size >> 20} MiB")
        of_size = [row for row in rows if row["size"] == size]
        base = statistics.median(of_size[0]["times"])
        for row in of_size:
            lines.append(_row(row["contender"], row, base, size))
    return lines


def train_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of one placement: a line per backend."""
    lines = [_line("backend", "step", "p10", "p90", "of gloo", "sent / size")]
    base = statistics.median(rows[0]["times"])
    return lines + [_row(row["contender"], row, base, row["size"]) for row in rows]


def _row(name: str, row: dict[str, Any], base: float, size: int) -> str:
    times = sorted(row["times"])
    median = statistics.median(times)
    tenth = [times[round(share * (len(times) - 1))] for share in (0.1, 0.9)]
    sent = statistics.median(row["sent"]) / size
    shown = [f"{1e3 * each:.2f} ms" for each in (median, *tenth)]
    return _line(name, *shown, f"{base / median:.2f} x", f"{sent:.2f}")


def _line(*cells: str) -> str:
    first = f"{cells[0]:<{WIDTHS[0]}}"
    rest = (f"{cell:>{width}}" for cell, width in zip(cells[1:], WIDTHS[1:], strict=True))
    return (first + "".join(rest)).rstrip()
