"""The runs of a folder: what each one's first and last lines say, without reading between.

A record may hold a million steps; a table of runs looks at its two ends only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.formatting import format_metric, format_number
from lockstep.record.reader import glance
from lockstep.record.recorder import FILE
from lockstep.report.summary import Summary, summarise
from lockstep.report.summary_text import STATES

__all__ = ["Listed", "of", "table"]


@dataclass(frozen=True)
class Listed:
    """One run of a folder: its figures, or why they cannot be told."""

    name: str
    summary: Summary | None
    trouble: str = ""

    def plain(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        if self.summary is None:
            return {"name": self.name, "state": "unreadable", "message": self.trouble}
        one = self.summary
        return {
            "name": self.name,
            "state": one.state,
            "recipe": one.recipe,
            "layout": one.layout,
            "started": one.started,
            "loss": one.loss if math.isfinite(one.loss) else None,
            "metrics": {k: v for k, v in one.metrics.items() if math.isfinite(v)},
            "held_out": one.held_out,
            "samples_per_second": one.speed if math.isfinite(one.speed) else None,
            "digest": one.digest,
        }


def of(folder: Path) -> list[Listed]:
    """Return the runs of `folder`, the oldest first."""
    found = list(listed(folder))
    return sorted(found, key=lambda one: (one.summary.started if one.summary else "", one.name))


def listed(folder: Path) -> Iterator[Listed]:
    """Yield a line for each folder in `folder` that holds a record."""
    for place in sorted(folder.iterdir()):
        if (place / FILE).exists():
            try:
                yield Listed(place.name, summarise(glance(place)))
            except LockstepError as error:
                yield Listed(place.name, None, str(error))


def table(found: list[Listed]) -> tuple[list[str], list[list[str]]]:
    """Return column names and rows of text."""
    metrics = list(
        dict.fromkeys(name for one in found if one.summary for name in one.summary.metrics)
    )[:2]
    names = ["run", "state", "recipe", "layout", "loss", *metrics, "samples/s", "digest"]
    return names, [row(one, metrics) for one in found]


def row(one: Listed, metrics: list[str]) -> list[str]:
    """Return one run as text; a record that cannot be read says so."""
    if one.summary is None:
        return [one.name, "unreadable"] + [""] * (5 + len(metrics))
    summary = one.summary
    values = ((name, summary.metrics.get(name, math.nan)) for name in metrics)
    cells = [
        format_metric(name, value).removeprefix(f"{name} ") if math.isfinite(value) else ""
        for name, value in values
    ]
    loss = f"{summary.loss:.4f}" if math.isfinite(summary.loss) else ""
    speed = format_number(summary.speed) if math.isfinite(summary.speed) else ""
    state = STATES[summary.state]
    layout = summary.layout.split(", ")[0]  # the rest is in the report
    figures = [loss, *cells, speed, summary.digest[:8]]
    return [one.name, state, summary.recipe, layout, *figures]
