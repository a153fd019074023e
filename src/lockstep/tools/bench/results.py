"""Results of the benchmark: statistics, the table with the columns of nccl-tests, JSON."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.tools.bench.measured_collectives import COLLECTIVES

__all__ = ["ITEM_BYTES", "Measurement", "caption", "header", "record", "rows"]

DTYPE, ITEM_BYTES = "float32", 4
"""The data type of all elements, and its size."""

COLUMNS = {
    "size (B)": 11, "count": 11, "type": 9, "redop": 8, "backend": 21, "time (us)": 10,
    "p10 (us)": 10, "p90 (us)": 10, "algbw (GB/s)": 14, "busbw (GB/s)": 14, "wrong": 7, "ratio": 7,
}  # fmt: skip
"""The columns, and their widths."""


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


def header() -> str:
    """Return the header line of the table."""
    return _align(list(COLUMNS))


def rows(results: list[Measurement]) -> list[str]:
    """Return the rows of one size; ratios are relative to the first result."""
    return [_row(result, results[0]) for result in results]


def _row(result: Measurement, first: Measurement) -> str:
    """Return the row of one contender; only the first row of a size names it."""
    what = [f"{result.size}", f"{result.count}", DTYPE, result.operation or "none"]
    start = [*(what if result is first else [""] * 4), result.backend]
    if result.error:
        return f"{_align(start)}  error: {result.error}"
    times = (result.median, result.quantile(0.1), result.quantile(0.9))
    figures = [f"{time:.1f}" if time < 10_000 else f"{time:.0f}" for time in times]
    figures += [f"{value:.4g}" for value in (result.algbw, result.busbw)]
    ratio = "-" if first.error else f"{result.median / first.median:.3g}"
    return _align([*start, *figures, f"{result.wrong}", ratio])


def _align(cells: list[str]) -> str:
    """Align cells in their columns, the backend to the left and the others to the right."""
    padded = [
        f"  {cell:<{width - 2}}" if name == "backend" else f"{cell:>{width}}"
        for cell, (name, width) in zip(cells, COLUMNS.items(), strict=False)  # a row may be short
    ]
    return "".join(padded).rstrip()


def caption(first: Measurement) -> str:
    """Return the explanation below the table."""
    factor = COLLECTIVES[first.collective].bus_factor(first.ranks)
    return (
        "time, p10, p90: median and quantiles over calls, of the slowest rank's time\n"
        f"busbw: algbw x {factor:.3g}; ratio: time over that of {first.backend}; "
        "wrong: wrong elements in checked calls, over all ranks"
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
