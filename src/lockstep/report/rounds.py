"""The rounds of an elastic run: who died and joined, and the cost of each death."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import orjson

from lockstep.formatting import format_count, format_duration, format_quantity
from lockstep.launcher.failure_attribution import signal_name
from lockstep.record.columns import Line, as_dict
from lockstep.record.reader import Run
from lockstep.report.reproduction import shorten_table
from lockstep.report.summary import number_or

__all__ = ["CHAOS_FILE", "KILL_COLUMNS", "ROUND_COLUMNS", "RoundsSummary", "summarize_rounds"]

CHAOS_FILE = "chaos.json"  # in the folder of a run: the output of `lockstep chaos --json`
ROUND_COLUMNS = (
    *("round", "step", "after", "ranks", "lost", "joined", "left"),
    *("pause", "repeated work"),
)
KILL_COLUMNS = ("kill", "member", "step", "next round", "kill to repeated step", "repeated work")


@dataclass(frozen=True)
class RoundsSummary:
    """The summary of the rounds of a run; all attributes are empty if the run is not elastic.

    Attributes:
        sentences: Sentences about deaths, newcomers, lost time and the result of `lockstep chaos`.
        rows: The rounds as rows of text.
        kills: The kills of `lockstep chaos` as rows of text.
    """

    sentences: list[str]
    rows: list[list[str]]
    kills: list[list[str]]


def summarize_rounds(run: Run) -> RoundsSummary:
    """Return the summary of the rounds of a run."""
    chaos = _read_chaos(run)
    kills = [each for each in _as_list(chaos.get("deaths")) if isinstance(each, dict)]
    return RoundsSummary(
        sentences=[*_describe_rounds(run), *_describe_chaos(chaos)],
        rows=shorten_table([_round_row(line) for line in run.rounds]),
        kills=shorten_table([_kill_row(number, each) for number, each in enumerate(kills, 1)]),
    )


# ---- the lines ----


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _members(line: Line, name: str) -> list[int]:
    """Return the members of a line under "joined" or "left"."""
    return [each for each in _as_list(line.get(name)) if type(each) is int]


def _lost(line: Line) -> dict[int, int]:
    """Return the members that died before a round, and the signals that killed them."""
    found = map(as_dict, _as_list(line.get("lost")))
    return {
        each["member"]: int(number_or(each.get("signal"), 0))
        for each in found
        if type(each.get("member")) is int
    }


def _pause(line: Line) -> float:
    """Return the seconds that training paused before a round; NaN if unknown."""
    return number_or(line.get("continued")) - number_or(line.get("noticed"))


def _lost_seconds(line: Line) -> float:
    """Return the seconds lost by the deaths before a round: the pause and the repeated work."""
    return _pause(line) + number_or(line.get("undone"), 0.0)


# ---- sentences and tables ----


def _describe_rounds(run: Run) -> Iterator[str]:
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
    names = sorted({signal_name(each) for each in signals if each > 0})
    return f" ({', '.join(names)})" if names else ""


def _round_row(line: Line) -> list[str]:
    lost = [
        f"{member} ({signal_name(signal)})" if signal > 0 else str(member)
        for member, signal in _lost(line).items()
    ]
    return [
        _format_count(line.get("round")),
        _format_count(line.get("step")),
        _format_seconds(number_or(line.get("t"))),
        _format_count(line.get("world_size")),
        ", ".join(lost),
        ", ".join(map(str, _members(line, "joined"))),
        ", ".join(map(str, _members(line, "left"))),
        _format_seconds(_pause(line)),
        _format_seconds(number_or(line.get("undone"))),
    ]


def _format_count(value: Any) -> str:
    return format_count(number_or(value))


def _format_seconds(seconds: float) -> str:
    return format_duration(seconds) if math.isfinite(seconds) else ""


def _read_chaos(run: Run) -> dict[str, Any]:
    """Return the result of `lockstep chaos`; empty if the command did not create this run."""
    try:
        return as_dict(orjson.loads((run.folder / CHAOS_FILE).read_bytes()))
    except (OSError, orjson.JSONDecodeError):
        return {}


def _describe_chaos(chaos: dict[str, Any]) -> Iterator[str]:
    if not chaos:
        return
    fired, planned = number_or(chaos.get("kills"), 0), number_or(chaos.get("planned"))
    sentence = f"`lockstep chaos` killed {format_quantity(fired, 'rank')} with SIGKILL"
    sentence += f" of {planned:,.0f} planned" if planned > fired else ""
    seed = number_or(chaos.get("seed"))
    sentence += f" (seed {seed:.0f})" if math.isfinite(seed) else ""
    same = "equal to" if chaos.get("equal") is True else "different from"
    yield f"{sentence}; the final weights are {same} those of the undisturbed run."


def _kill_row(number: int, kill: dict[str, Any]) -> list[str]:
    return [
        f"{number}",
        _format_count(kill.get("member")),
        _format_count(kill.get("step")),
        _format_count(kill.get("round")),
        _format_seconds(number_or(kill.get("seconds_to_repeat"))),
        _format_seconds(number_or(kill.get("repeated_seconds"))),
    ]
