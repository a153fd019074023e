"""The table, with nccl-tests' columns: printed line by line while the measurement goes on."""

from __future__ import annotations

from typing import Any

from lockstep.bench.collectives import COLLECTIVES
from lockstep.bench.rounds import Result

__all__ = ["caption", "header", "record", "rows"]

COLUMNS = ("size", "count", "type", "redop", "backend", "time", "p10", "p90",
           "algbw", "busbw", "wrong", "ratio")  # fmt: skip
UNITS = ("(B)", "(elements)", "", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "", "")
WIDTHS = (11, 11, 9, 8, 19, 10, 10, 10, 8, 8, 6, 7)
LEFT = "backend"


def header() -> str:
    """Return the two lines above the numbers."""
    return line(COLUMNS) + "\n" + line(UNITS)


def rows(results: list[Result]) -> list[str]:
    """Return the lines of one size; the ratio is to the time of the first."""
    return [row(result, results[0], number == 0) for number, result in enumerate(results)]


def row(result: Result, first: Result, is_first: bool) -> str:
    """Return one contender's line; the size stands on the first only."""
    order = result.order
    reduces = COLLECTIVES[order.collective].reduces
    what = (f"{result.size}", f"{order.count}", order.dtype, order.op if reduces else "none")
    start = what if is_first else ("",) * 4
    name = result.contender.name
    if result.cannot:
        return line((*start, name)) + f"  cannot: {result.cannot}"
    times = (result.median, result.quantile(0.1), result.quantile(0.9))
    return line(
        (
            *start,
            name,
            *(microseconds(time) for time in times),
            bandwidth(result.algbw),
            bandwidth(result.busbw),
            f"{result.wrong}",
            ratio(result, first),
        )
    )


def line(cells: tuple[str, ...]) -> str:
    """Return cells in their columns; the backend's name is ranged left."""
    padded = [
        f"  {cell:<{width - 2}}" if column == LEFT else f"{cell:>{width}}"
        for cell, width, column in zip(cells, WIDTHS, COLUMNS, strict=False)  # a short line is fine
    ]
    return "".join(padded).rstrip()


def microseconds(time: float) -> str:
    """Return a time with one place after the point, or none where it is long."""
    return f"{time:.1f}" if time < 10_000 else f"{time:.0f}"


def bandwidth(value: float) -> str:
    """Return GB/s with two places after the point, more where it is little."""
    return f"{value:.2f}" if value >= 0.095 or value == 0 else f"{value:.4f}"


def ratio(result: Result, first: Result) -> str:
    """Return how many times as long as the first it took."""
    if first.cannot:
        return "-"
    value = result.median / first.median
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def caption(result: Result, first: str) -> str:
    """Return what a reader has to know, under the table."""
    factor = COLLECTIVES[result.order.collective].factor(result.ranks)
    return (
        "time: median over calls of the slowest rank's; p10 and p90: a tenth of the calls was "
        f"faster, a tenth slower\nbusbw: algbw x {factor:.3g}; ratio: time over that of {first}; "
        "wrong: elements of checked calls, over all ranks"
    )


def record(result: Result, first: Result, machine: str, command: str) -> dict[str, Any]:
    """Return a result as an object of the JSON file."""
    order = result.order
    reduces = COLLECTIVES[order.collective].reduces
    return {
        "backend": result.contender.name,
        "collective": order.collective,
        "size_bytes": result.size,
        "count": order.count,
        "dtype": order.dtype,
        "op": order.op if reduces else None,
        "in_place": order.in_place or COLLECTIVES[order.collective].is_shared,
        "nprocs": result.ranks,
        "calls": len(result.times),
        "median_us": round(result.median, 3),
        "p10_us": round(result.quantile(0.1), 3),
        "p90_us": round(result.quantile(0.9), 3),
        "algbw_gbps": round(result.algbw, 4),
        "busbw_gbps": round(result.busbw, 4),
        "wrong": result.wrong,
        "ratio": None if first.cannot else round(result.median / first.median, 4),
        "library": result.contender.peer.library,
        "machine": machine,
        "command": command,
    }
