"""Refusals: what is said of connections that were refused, however many there are. Pure.

The first one is reported at once. Those that follow are counted, and reported together
`INTERVAL` seconds after the report before. Reports consist of the callers' addresses,
as the kernel gives them, and of our own words: nothing that a stranger sent is in them.
"""

from __future__ import annotations

import math
from collections import Counter

__all__ = ["Refusals"]

INTERVAL = 10.0  # seconds from one report to the next


class Refusals:
    """Counts refused connections between two reports; times are in seconds of any clock."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._address = ""
        self._due = -math.inf

    def note(self, address: str, reason: str) -> None:
        """Count a connection from `address`; `reason` is one of a few fixed sentences."""
        self._reasons[reason] += 1
        self._address = address

    def due(self) -> float | None:
        """Return when the next report is due; None while there is nothing to report."""
        return self._due if self._reasons else None

    def report(self, now: float) -> str:
        """Return one line on all connections since the last report."""
        reasons, self._reasons = self._reasons, Counter()
        self._due = now + INTERVAL
        if reasons.total() == 1:
            (reason,) = reasons
            return f"a connection from {self._address} was refused: {reason}"
        counts = "; ".join(f"{reason} ({count:,})" for reason, count in reasons.most_common())
        return (
            f"{reasons.total():,} connections were refused, "
            f"the last one from {self._address}: {counts}"
        )
