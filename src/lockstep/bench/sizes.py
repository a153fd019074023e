"""Sizes in bytes with units: 4, 64K, 1MiB."""

from __future__ import annotations

import re

from lockstep.errors import UsageError

__all__ = ["format_size", "parse_size", "parse_sizes", "size_range"]

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]?)(?:I?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of "4", "64K", "1MiB" or "0.5G"; units are powers of 1024."""
    found = PATTERN.fullmatch(text.strip())
    if not found:
        raise UsageError(f"{text!r} is not a size: write 4, 64K, 1MiB or 1G")
    return int(float(found[1]) * UNITS[found[2].upper()])


def parse_sizes(text: str) -> list[int]:
    """Return the sizes of a comma-separated list, in bytes."""
    return [parse_size(part) for part in text.split(",")]


def size_range(begin: int, end: int, factor: float) -> list[int]:
    """Return `begin`, `begin * factor`, ... up to `end`."""
    if begin < 1 or end < begin or factor <= 1:
        raise UsageError(
            f"sizes from {begin} to {end} bytes by a factor of {factor:g}: the first must be at "
            "least 1, the last not below the first, and the factor greater than 1"
        )
    sizes, size = [], float(begin)
    while size <= end:
        sizes.append(int(size))
        size *= factor
    return sorted(set(sizes))


def format_size(size: float) -> str:
    """Format bytes: "4 B", "64 KiB", "1.5 MiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{round(size / unit, 2):g} {name}"
    return f"{size:g} B"
