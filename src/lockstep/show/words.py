"""Numbers in words: how durations, rates, sizes and metrics read, everywhere the same."""

from __future__ import annotations

import math

__all__ = ["count", "duration", "metric", "percent", "rate", "short", "size"]

# metrics that are shares of one, shown in per cent
SHARES = ("accuracy", "precision", "recall", "f1", "auc", "error")


def duration(seconds: float) -> str:
    """Return `seconds` as a reader says it: "85.0 us", "12.3 ms", "2 min 5 s", "3 h 12 min"."""
    if not math.isfinite(seconds):
        return "?"
    if isinstance(seconds, int) and abs(seconds) < 60:
        return f"{seconds} s"
    for limit, factor, unit in ((0.9995e-3, 1e6, "us"), (0.9995, 1e3, "ms"), (59.95, 1, "s")):
        if abs(seconds) < limit:
            return f"{short(seconds * factor)} {unit}" if seconds else "0 s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def short(value: float) -> str:
    """Return a number with three significant digits, never in exponents between 1e-4 and 1e9."""
    if not math.isfinite(value):
        return "?"
    if value == 0 or not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:#.3g}"


def rate(per_second: float) -> str:
    """Return a number of things a second: "5,321", "88.4"."""
    return short(per_second)


def count(things: float) -> str:
    """Return a whole number with its thousands apart."""
    return f"{things:,.0f}" if math.isfinite(things) else "?"


def percent(share: float) -> str:
    """Return a share of one in per cent: "97.2%"."""
    return f"{100 * share:.1f}%" if math.isfinite(share) else "?"


def metric(name: str, value: float) -> str:
    """Return a metric with its name: "accuracy 97.2%", "perplexity 12.3"."""
    shown = percent(value) if is_share(name) else short(value)
    return f"{name} {shown}"


def is_share(name: str) -> bool:
    """Whether a metric of this name is a share of one."""
    return any(name == share or name.endswith("_" + share) for share in SHARES)


def size(octets: float) -> str:
    """Return a number of bytes: "812 MB", "1.52 GB" (powers of ten)."""
    if not math.isfinite(octets):
        return "?"
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(octets) >= 0.9995 * factor:
            return f"{short(octets / factor)} {unit}"
    return f"{octets:.0f} B"
