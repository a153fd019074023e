"""Sizes as people write them: 4, 64K, 1MiB."""

from __future__ import annotations

import re

from lockstep.errors import UsageError

__all__ = ["between", "listed", "parsed", "spoken"]

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
WRITTEN = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]?)(?:I?B)?", re.IGNORECASE)


def parsed(text: str) -> int:
    """Return the bytes of "4", "64K", "1MiB", "0.5G" (units are powers of 1024)."""
    found = WRITTEN.fullmatch(text.strip())
    if not found:
        raise UsageError(f"{text!r} is no size: write 4, 64K, 1MiB or 1G")
    return int(float(found[1]) * UNITS[found[2].upper()])


def listed(text: str) -> list[int]:
    """Return the sizes of a list with commas."""
    return [parsed(part) for part in text.split(",")]


def between(begin: int, end: int, factor: float) -> list[int]:
    """Return `begin`, `begin * factor`, ... up to `end`, in bytes."""
    if begin < 1 or end < begin or factor <= 1:
        raise UsageError(
            f"sizes from {begin} to {end} bytes by a factor of {factor:g}: begin at 1 or more, end "
            "beyond the beginning, and grow by more than 1"
        )
    sizes, size = [], float(begin)
    while size <= end:
        sizes.append(int(size))
        size *= factor
    return sorted(set(sizes))


def spoken(size: float) -> str:
    """Return bytes as a label: "4 B", "64 KiB", "1.5 MiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{round(size / unit, 2):g} {name}"
    return f"{size:g} B"
