"""Results of the benchmark: statistics, rows with the columns of nccl-tests, JSON."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.tools.bench.measured_collectives import COLLECTIVES

__all__ = [
    "COLUMNS",
    "ITEM_BYTES",
    "OPTIONAL",
    "Measurement",
    "explain_columns",
    "list_errors",
    "record",
    "rows",
]

DTYPE = "float32"
ITEM_BYTES = 4
"""The data type of all elements, and its size."""

COLUMNS = (
    "size (B)", "backend", "median (us)", "p10 (us)", "p90 (us)", "busbw (GB/s)", "ratio", "wrong",
    "algbw (GB/s)", "count", "type", "redop",
)  # fmt: skip
OPTIONAL = (
    "redop", "type", "count", "algbw (GB/s)", "wrong", "busbw (GB/s)", "p90 (us)", "p10 (us)",
)  # fmt: skip
"""Columns that a narrow terminal leaves out, in this order."""


@dataclass(frozen=True)
class Measurement:
    """The measurement of one contender at one size.

    Attributes:
        backend: The name of the contender.
        library: The library, with its version.
        collective: The name of the collective.
        ranks: The number of ranks.
        size: The bytes of the message.
        count: The elements per part.
        times: The microseconds of the calls, ascending; empty if there is an error.
        wrong: The wrong elements in checked calls, over all ranks.
        error: Why the backend could not be measured.
    """

    backend: str
    library: str
    collective: str
    ranks: int
    size: int
    count: int
    times: list[float]
    wrong: int = 0
    error: str = ""

    @property
    def median(self) -> float:
        """The median in microseconds."""
        return statistics.median(self.times)

    def quantile(self, share: float) -> float:
        """Return the quantile `share` in microseconds, interpolated linearly."""
        return float(np.quantile(self.times, share))

    @property
    def algbw(self) -> float:
        """The algorithm bandwidth in GB/s."""
        return self.size / self.median / 1e3

    @property
    def busbw(self) -> float:
        """The bus bandwidth in GB/s."""
        return self.algbw * COLLECTIVES[self.collective].bus_factor(self.ranks)

    @property
    def operation(self) -> str | None:
        """The reduction operation, if there is one."""
        return "SUM" if COLLECTIVES[self.collective].is_reduction else None


def rows(results: list[Measurement]) -> list[tuple[str, ...]]:
    """Return the rows of one size; ratios are relative to the first result."""
    return [_row(result, results[0]) for result in results]


def _row(result: Measurement, first: Measurement) -> tuple[str, ...]:
    """Return the row of one contender; only the first row of a size names it."""
    is_first = result is first
    size = f"{result.size}" if is_first else ""
    what = (f"{result.count}", DTYPE, result.operation or "none") if is_first else ("", "", "")
    if result.error:
        return (size, result.backend, *["-"] * 7, *what)
    times = (result.median, result.quantile(0.1), result.quantile(0.9))
    figures = [f"{time:.1f}" if time < 10_000 else f"{time:.0f}" for time in times]
    ratio = "-" if first.error else f"{result.median / first.median:.3g}"
    bandwidths = (f"{result.busbw:.4g}", f"{result.algbw:.4g}")
    return (
        size, result.backend, *figures, bandwidths[0], ratio, f"{result.wrong}", bandwidths[1],
        *what,
    )  # fmt: skip


def list_errors(results: list[Measurement]) -> list[str]:
    """Return a sentence for each contender that could not be measured at a size."""
    return [
        f"{result.backend} could not be measured with {result.size} bytes: {result.error}"
        for result in results
        if result.error
    ]


def explain_columns(first: Measurement) -> tuple[str, str]:
    """Return sentences that explain the columns."""
    factor = COLLECTIVES[first.collective].bus_factor(first.ranks)
    return (
        "median, p10, p90: median and quantiles over calls, of the slowest rank's time",
        f"busbw: algbw x {factor:.3g}; ratio: median over that of {first.backend}; "
        "wrong: wrong elements in checked calls, over all ranks",
    )


def record(result: Measurement, first: Measurement, machine: str, command: str) -> dict[str, Any]:
    """Return a result as an object for the JSON file."""
    return {
        "backend": result.backend,
        "collective": result.collective,
        "size_bytes": result.size,
        "count": result.count,
        "dtype": DTYPE,
        "op": result.operation,
        "nprocs": result.ranks,
        "calls": len(result.times),
        "median_us": round(result.median, 3),
        "p10_us": round(result.quantile(0.1), 3),
        "p90_us": round(result.quantile(0.9), 3),
        "algbw_gbps": round(result.algbw, 4),
        "busbw_gbps": round(result.busbw, 4),
        "wrong": result.wrong,
        "ratio": None if first.error else round(result.median / first.median, 4),
        "library": result.library,
        "machine": machine,
        "command": command,
    }
