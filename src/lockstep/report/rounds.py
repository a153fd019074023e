"""The rounds of an elastic run: its members over time, their deaths, and the cost of each death.

    place 0   0 ──────────────────────────x      4 ──────────
    place 1   1 ─────────────────────────────────────────────     x  killed
    place 2   2 ────────x    3 ──────────────────────────────

A member is a process; its number is never reused. A newcomer is drawn at the first place whose
member has ended. Times are those of the record, in seconds since the run began.
"""

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
from lockstep.report.chart import Tick, exact_axis
from lockstep.report.reproduction import shorten_table
from lockstep.report.summary import last_time, number_or
from lockstep.report.timeline import HTML_WIDTH

__all__ = ["CHAOS_FILE", "KILL_COLUMNS", "ROUND_COLUMNS", "MemberBar", "MemberLane"]
__all__ += ["MembersDrawing", "RoundsSummary", "summarize_rounds"]

CHAOS_FILE = "chaos.json"  # in the folder of a run: the output of `lockstep chaos --json`
ROUND_COLUMNS = (
    *("round", "step", "after", "ranks", "lost", "joined", "left"),
    *("pause", "repeated work"),
)
KILL_COLUMNS = ("kill", "member", "step", "next round", "kill to repeated step", "repeated work")
MAX_PLACES = 32  # places that are drawn
MAX_MARKS = 60  # rounds that are marked; more would hide the members
MIN_LABELED = 0.013  # fraction of the width per character from which a bar shows its member


@dataclass(frozen=True)
class MemberBar:
    """The bar of one member, as the template draws it; `tooltip` is shown under the pointer."""

    x: int
    width: int
    shade: int
    label: str
    tooltip: str
    is_killed: bool

    @property
    def middle(self) -> float:
        """The position of the label, in percent of the lane's width."""
        return 100 * (self.x + self.width / 2) / HTML_WIDTH


@dataclass(frozen=True)
class MemberLane:
    """The successive members at one place."""

    place: int
    bars: tuple[MemberBar, ...]


@dataclass(frozen=True)
class MembersDrawing:
    """A drawing of members over time; `rounds` are the positions at which a round began."""

    lanes: tuple[MemberLane, ...]
    rounds: tuple[Tick, ...]
    ticks: tuple[Tick, ...]
    num_hidden: int


@dataclass(frozen=True)
class RoundsSummary:
    """The summary of the rounds of a run; all attributes are empty if the run is not elastic.

    Attributes:
        sentences: Sentences about deaths, newcomers, lost time and the result of `lockstep chaos`.
        rows: The rounds as rows of text.
        kills: The kills of `lockstep chaos` as rows of text.
        drawing: The members over time. None: they are not known.
    """

    sentences: list[str]
    rows: list[list[str]]
    kills: list[list[str]]
    drawing: MembersDrawing | None


def summarize_rounds(run: Run) -> RoundsSummary:
    """Return the summary of the rounds of a run."""
    chaos = _read_chaos(run)
    kills = [each for each in _as_list(chaos.get("deaths")) if isinstance(each, dict)]
    return RoundsSummary(
        sentences=[*_describe_rounds(run), *_describe_chaos(chaos)],
        rows=shorten_table([_round_row(line) for line in run.rounds]),
        kills=shorten_table([_kill_row(number, each) for number, each in enumerate(kills, 1)]),
        drawing=_draw_members(run),
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


# ---- the drawing ----


@dataclass
class _Member:
    """A member at its place, from `begin` to `end`; `signal` is None if it was not lost."""

    number: int
    place: int
    begin: float
    end: float = math.inf
    signal: int | None = None


def _draw_members(run: Run) -> MembersDrawing | None:
    """Draw the members of the last launch of a run; None without rounds or times."""
    lines = _last_launch(run.rounds)
    begin = _launch_begin(run, lines)
    end = number_or((run.end or {}).get("t"), last_time(run))
    members = _trace_members(lines, begin, number_or(run.layout.get("world_size"), 0))
    if not members or not math.isfinite(end):
        return None
    last = max(end, *(each.begin for each in members))
    axis = exact_axis(begin, last, format_duration, whole=False)
    span = axis.high - axis.low
    places = 1 + max(each.place for each in members)
    lanes = []
    for place in range(min(places, MAX_PLACES)):
        here = [each for each in members if each.place == place]
        bars = [_draw_bar(each, at, axis.low, span, end) for at, each in enumerate(here)]
        lanes.append(MemberLane(place, tuple(bars)))
    rounds = [(number_or(line.get("t")), _format_count(line.get("round"))) for line in lines]
    ticks = [Tick((time - axis.low) / span, f"round {n}") for time, n in rounds if time >= begin]
    if len(ticks) > MAX_MARKS:
        ticks = []
    return MembersDrawing(tuple(lanes), tuple(ticks), axis.ticks, max(0, places - MAX_PLACES))


def _last_launch(rounds: Sequence[Line]) -> list[Line]:
    """Return the rounds of the last launch; a launch counts its rounds from 1."""
    first = max((at for at, line in enumerate(rounds) if line.get("round") == 1), default=0)
    return [line for line in rounds[first:] if math.isfinite(number_or(line.get("t")))]


def _launch_begin(run: Run, lines: Sequence[Line]) -> float:
    """Return the time at which the launch of some rounds began."""
    first = number_or(lines[0].get("t")) if lines else math.nan
    times = [number_or(line.get("t")) for line in run.resumes]
    return max((time for time in times if time < first), default=0.0)


def _trace_members(lines: Sequence[Line], begin: float, world_size: float) -> list[_Member]:
    """Return the members at their places; the numbers of newcomers follow the initial members'."""
    if not lines:
        return []
    joined = [member for line in lines for member in _members(line, "joined")]
    named = [member for line in lines for member in (*_lost(line), *_members(line, "left"))]
    if not joined:
        world_size = max([world_size, *(member + 1 for member in named)])
    first = min([min(joined)] if joined else [int(world_size)])
    found = {number: _Member(number, number, begin) for number in range(min(first, 1 << 12))}
    for line in lines:
        time, pause = number_or(line.get("t")), _pause(line)
        noticed = time - pause if 0 <= pause <= time else time
        for number, signal in _lost(line).items():
            _end(found.get(number), max(noticed, begin), signal)
        for number in _members(line, "left"):
            _end(found.get(number), time, None)
        for number in _members(line, "joined"):
            taken = {each.place for each in found.values() if each.end > time}
            place = next(place for place in range(len(taken) + 1) if place not in taken)
            found[number] = _Member(number, place, time)
    return list(found.values())


def _end(member: _Member | None, time: float, signal: int | None) -> None:
    if member is not None and not math.isfinite(member.end):
        member.end, member.signal = max(member.begin, time), signal


def _draw_bar(member: _Member, at: int, low: float, span: float, last: float) -> MemberBar:
    is_killed = bool(member.signal)
    end = min(member.end, max(last, member.begin))
    x, to = (round(HTML_WIDTH * (time - low) / span) for time in (member.begin, end))
    tooltip = f"member {member.number}: from {format_duration(member.begin)}"
    if math.isfinite(member.end):
        how = "left" if member.signal is None else "ended because it lost another member"
        if member.signal:
            how = f"killed by {signal_name(member.signal)}"
        tooltip += f", {how} after {format_duration(member.end)}"
    width = max(1, to - x)
    label = str(member.number)
    has_room = width >= MIN_LABELED * HTML_WIDTH * (len(label) + 1)
    return MemberBar(x, width, at % 2, label if has_room else "", tooltip, is_killed)
