"""Results of the benchmark: statistics, the table with the columns of nccl-tests, JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.tools.bench.measured_collectives import COLLECTIVES
from lockstep.tools.bench.runners import Runner
from lockstep.tools.bench.workload import DTYPE, Workload

__all__ = [
    "Contender",
    "Result",
    "TimingResult",
    "caption",
    "header",
    "quantile",
    "record",
    "rows",
]

COLUMNS = ("size", "count", "type", "redop", "backend", "time", "p10", "p90",
           "algbw", "busbw", "wrong", "ratio")  # fmt: skip
UNITS = ("(B)", "(elements)", "", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "", "")
WIDTHS = (11, 11, 9, 8, 19, 10, 10, 10, 8, 8, 6, 7)
LEFT = "backend"


def quantile(times: Sequence[float], share: float) -> float:
    """Return a quantile of ascending times, interpolated linearly."""
    return float(np.quantile(times, share))


class TimingResult:
    """Times in ascending order, or the error that prevented them."""

    times: Sequence[float]
    error: str

    @property
    def median(self) -> float:
        """The median, in the unit of the times."""
        return statistics.median(self.times)

    def quantile(self, share: float) -> float:
        """Return the quantile `share`, in the unit of the times."""
        return quantile(self.times, share)


@dataclass(frozen=True)
class Contender:
    """A row of the table: a runner, whether its buffers are in shared memory, or the copy."""

    name: str
    runner: Runner
    shared_memory: bool = False
    is_copy: bool = False  # its ranks copy as many bytes as the message has


@dataclass(frozen=True)
class Result(TimingResult):
    """The result of one contender at one size."""

    contender: Contender
    workload: Workload
    ranks: int
    size: int
    times: tuple[float, ...] = ()  # microseconds, ascending
    wrong: int = 0
    error: str = ""

    @property
    def algbw(self) -> float:
        """The algorithm bandwidth in GB/s."""
        return self.size / self.median / 1e3

    @property
    def busbw(self) -> float:
        """The bus bandwidth in GB/s; for a memory copy, the algorithm bandwidth."""
        if self.contender.is_copy:
            return self.algbw
        return self.algbw * COLLECTIVES[self.workload.collective].bus_factor(self.ranks)


def header() -> str:
    """Return the two header lines of the table."""
    return line(COLUMNS) + "\n" + line(UNITS)


def rows(results: list[Result]) -> list[str]:
    """Return the rows of one size; ratios are relative to the first result."""
    return [row(result, results[0], number == 0) for number, result in enumerate(results)]


def row(result: Result, first: Result, is_first: bool) -> str:
    """Return the row of one contender; only the first row of a size names it."""
    workload = result.workload
    is_reduction = COLLECTIVES[workload.collective].is_reduction
    what = (
        f"{result.size}",
        f"{workload.count}",
        DTYPE,
        "SUM" if is_reduction else "none",
    )
    start = what if is_first else ("",) * 4
    name = result.contender.name
    if result.error:
        return line((*start, name)) + f"  error: {result.error}"
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
    """Align cells in their columns, the backend to the left and the others to the right."""
    padded = [
        f"  {cell:<{width - 2}}" if column == LEFT else f"{cell:>{width}}"
        for cell, width, column in zip(cells, WIDTHS, COLUMNS, strict=False)  # a short line is fine
    ]
    return "".join(padded).rstrip()


def microseconds(time: float) -> str:
    """Format microseconds with one decimal, or none from 10,000 on."""
    return f"{time:.1f}" if time < 10_000 else f"{time:.0f}"


def bandwidth(value: float) -> str:
    """Format GB/s with two decimals, or four below 0.1."""
    return f"{value:.2f}" if value >= 0.095 or value == 0 else f"{value:.4f}"


def ratio(result: Result, first: Result) -> str:
    """Format the median relative to that of the first result."""
    if first.error:
        return "-"
    value = result.median / first.median
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def caption(result: Result, first: str) -> str:
    """Return the explanation below the table."""
    factor = COLLECTIVES[result.workload.collective].bus_factor(result.ranks)
    return (
        "time, p10, p90: median and quantiles over calls, of the slowest rank's time\n"
        f"busbw: algbw x {factor:.3g}; ratio: time over that of {first}; "
        "wrong: wrong elements in checked calls, over all ranks"
    )


def record(result: Result, first: Result, machine: str, command: str) -> dict[str, Any]:
    """Return a result as an object for the JSON file."""
    workload = result.workload
    is_reduction = COLLECTIVES[workload.collective].is_reduction
    return {
        "backend": result.contender.name,
        "collective": workload.collective,
        "size_bytes": result.size,
        "count": workload.count,
        "dtype": DTYPE,
        "op": "SUM" if is_reduction else None,
        "in_place": COLLECTIVES[workload.collective].is_in_place,
        "nprocs": result.ranks,
        "calls": len(result.times),
        "median_us": round(result.median, 3),
        "p10_us": round(result.quantile(0.1), 3),
        "p90_us": round(result.quantile(0.9), 3),
        "algbw_gbps": round(result.algbw, 4),
        "busbw_gbps": round(result.busbw, 4),
        "wrong": result.wrong,
        "ratio": None if first.error else round(result.median / first.median, 4),
        "library": result.contender.runner.library,
        "machine": machine,
        "command": command,
    }
