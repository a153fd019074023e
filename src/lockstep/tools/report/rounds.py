"""The rounds of an elastic run: who died and joined, and the cost of each death."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from lockstep.formatting import format_count, format_duration, format_quantity
from lockstep.launcher.failure_attribution import signal_name
from lockstep.record.columns import Line, as_dict
from lockstep.record.reader import Run
from lockstep.tools.report.summary import number_or

__all__ = ["round_sentences"]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _members(line: Line, name: str) -> list[int]:
    """Return the members of a line under "joined" or "left"."""
    return [member for member in _as_list(line.get(name)) if type(member) is int]


def _lost(line: Line) -> dict[int, int]:
    """Return the members that died before a round, and the signals that killed them."""
    deaths = map(as_dict, _as_list(line.get("lost")))
    return {
        death["member"]: int(number_or(death.get("signal"), 0))
        for death in deaths
        if type(death.get("member")) is int
    }


def _pause(line: Line) -> float:
    """Return the seconds that training paused before a round; NaN if unknown."""
    return number_or(line.get("continued")) - number_or(line.get("noticed"))


def _lost_seconds(line: Line) -> float:
    """Return the seconds lost by the deaths before a round: the pause and the repeated work."""
    return _pause(line) + number_or(line.get("undone"), 0.0)


def round_sentences(run: Run) -> Iterator[str]:
    """Yield sentences on deaths, newcomers and lost time; none if the run is not elastic."""
    if not run.rounds:
        return
    deaths = [signal for line in run.rounds for signal in _lost(line).values()]
    joined = sum(len(_members(line, "joined")) for line in run.rounds)
    left = sum(len(_members(line, "left")) for line in run.rounds)
    parts = [f"{format_quantity(len(deaths), 'rank')} died{_name_signals(deaths)}"]
    parts += [f"{format_count(joined)} joined"] if joined else []
    parts += [f"{format_count(left)} left"] if left else []
    yield f"{format_quantity(len(run.rounds) + 1, 'round')}: {', '.join(parts)}."
    costs = [_lost_seconds(line) for line in run.rounds if _lost(line)]
    if known := [cost for cost in costs if math.isfinite(cost)]:
        yield (
            f"A round after a death cost {format_duration(median(known))} (median; at most "
            f"{format_duration(max(known))}, {format_duration(sum(known))} in total): the pause "
            "from when the death was noticed to the repeated step, and the repeated work."
        )
    joins = [_pause(line) for line in run.rounds if not _lost(line) and _members(line, "joined")]
    if known := [pause for pause in joins if math.isfinite(pause)]:
        yield f"Training paused for {format_duration(median(known))} when a rank joined (median)."


def _name_signals(signals: Sequence[int]) -> str:
    names = sorted({signal_name(signal) for signal in signals if signal > 0})
    return f" ({', '.join(names)})" if names else ""
