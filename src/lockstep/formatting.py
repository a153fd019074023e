"""Numbers formatted for people: durations, sizes, percentages and metrics."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence

from lockstep.kernel.errors import UsageError

__all__ = [
    "format_bytes",
    "format_count",
    "format_digest",
    "format_duration",
    "format_loss",
    "format_metric",
    "format_metric_value",
    "format_number",
    "format_numbered",
    "format_percent",
    "format_quantity",
    "format_size",
    "is_ratio",
    "parse_size",
    "parse_sizes",
]

NO_STATE = hashlib.sha256().hexdigest()  # the digest of a state without tensors

# Metrics between 0 and 1, shown as percentages.
RATIOS = ("accuracy", "precision", "recall", "f1", "auc", "error")


def format_duration(seconds: float) -> str:
    """Format seconds with a fitting unit: "85.0 us", "12.3 ms", "2 min 5 s", "3 h 12 min"."""
    if not math.isfinite(seconds):
        return "?"
    if isinstance(seconds, int) and abs(seconds) < 60:
        return f"{seconds} s"
    for limit, factor, unit in ((0.9995e-3, 1e6, "us"), (0.9995, 1e3, "ms"), (59.95, 1, "s")):
        if abs(seconds) < limit:
            return f"{format_number(seconds * factor)} {unit}" if seconds else "0 s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_digest(digest: str) -> str:
    """Format the digest of an optimizer's state: "no state" if it has no tensors."""
    return "no state" if digest == NO_STATE else digest


def format_number(value: float) -> str:
    """Format a number with three significant digits; no exponent between 1e-4 and 1e9."""
    if not math.isfinite(value):
        return "?"
    if value == 0 or not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:#.3g}"


def format_loss(value: float) -> str:
    """Format a loss: "0.5775" with four decimals, "2.4e-07" with three significant digits."""
    return f"{value:.4f}" if 0.01 <= abs(value) < 1000 else format_number(value)


def format_count(count: float) -> str:
    """Format an integer with thousands separators: "1,234,567"."""
    return f"{count:,.0f}" if math.isfinite(count) else "?"


def format_quantity(count: float, thing: str, plural: str = "s") -> str:
    """Format a number of things: "1 stage", "8 micro-batches" (with `plural="es"`)."""
    return f"{format_count(count)} {thing}{'' if count == 1 else plural}"


def format_numbered(thing: str, numbers: Sequence[int]) -> str:
    """Format numbered things: "rank 2", "ranks 0 and 2", "ranks 0, 1 and 2"."""
    if len(numbers) == 1:
        return f"{thing} {numbers[0]}"
    return f"{thing}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def format_percent(ratio: float) -> str:
    """Format a ratio as a percentage: 0.972 is "97.2%"."""
    return f"{100 * ratio:.1f}%" if math.isfinite(ratio) else "?"


def format_metric(name: str, value: float) -> str:
    """Format a metric with its name: "accuracy 97.2%", "perplexity 12.3"."""
    return f"{name} {format_metric_value(name, value)}"


def format_metric_value(name: str, value: float) -> str:
    """Format the value of a metric, as a percentage if its name is that of a ratio."""
    return format_percent(value) if is_ratio(name) else format_number(value)


def is_ratio(metric: str) -> bool:
    """Return whether a metric of this name is between 0 and 1."""
    return any(metric == ratio or metric.endswith("_" + ratio) for ratio in RATIOS)


def format_bytes(count: float) -> str:
    """Format a number of bytes with a decimal unit: "812 MB", "1.52 GB"."""
    if not math.isfinite(count):
        return "?"
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= 0.9995 * factor:
            return f"{format_number(count / factor)} {unit}"
    return f"{count:.0f} B"


# --- sizes ---------------------------------------------------------------------------------------

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]?)(?:I?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of "4", "64K", "1MiB" or "0.5G"; units are powers of 1024."""
    match = PATTERN.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{text!r} is not a size: write 4, 64K, 1MiB or 1G")
    return int(float(match[1]) * UNITS[match[2].upper()])


def parse_sizes(text: str) -> list[int]:
    """Return the sizes of a comma-separated list, in bytes."""
    return [parse_size(part) for part in text.split(",")]


def format_size(size: float) -> str:
    """Format bytes: "4 B", "64 KiB", "1.5 MiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{round(size / unit, 2):g} {name}"
    return f"{size:g} B"
