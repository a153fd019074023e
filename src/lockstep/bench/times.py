"""Times: many calls, told by a few numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["Timed", "quantile"]


def quantile(times: Sequence[float], share: float) -> float:
    """Return the time that `share` of `times`, which ascend, stay below."""
    place = share * (len(times) - 1)
    low = int(place)
    high = min(low + 1, len(times) - 1)
    return times[low] + (place - low) * (times[high] - times[low])


class Timed:
    """What a contender did: `times` ascend; `cannot` says why it did nothing."""

    times: Sequence[float]
    cannot: str

    @property
    def median(self) -> float:
        """The median of the times, in their unit."""
        return statistics.median(self.times)

    def quantile(self, share: float) -> float:
        """Return the time that `share` of the calls stayed below, in their unit."""
        return quantile(self.times, share)
