"""The failure of a test on ranks as text: the first failure, and where the other ranks were."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.formatting import format_numbered
from lockstep.launcher.failure_attribution import (
    Outcome,
    describe_end,
    find_first_failure,
    find_same_failures,
    make_rank_error,
)
from pytest_lockstep.rank_order import Result

__all__ = ["Failure", "describe_failure", "drop_outer_frames", "summarize"]

# The frames of pytest that call a test or fixture; frames outside of them are pytest's or ours.
OUTER = re.compile(
    r"    _pytest/(python|fixtures)\.py:\d+ in (pytest_pyfunc_call|call_fixture_func)$"
)


@dataclass(frozen=True)
class Failure:
    """The failure of a test on ranks.

    Attributes:
        sentence: A sentence about the first failure.
        rank: The rank that failed first; None if it was not a single rank.
        others: The state of the other ranks, in lines.
        report: The serialized report of that rank; None if there is none.
        kind: The pickled class of its exception, in hexadecimal; "" if there is none.
    """

    sentence: str
    rank: int | None = None
    others: tuple[str, ...] = ()
    report: dict[str, Any] | None = None
    kind: str = ""

    def __str__(self) -> str:
        """Return the sentence and the state of the other ranks."""
        return "\n".join([self.sentence, *self.others])


def describe_failure(
    outcomes: Mapping[int, Outcome], places: Mapping[int, str], results: Mapping[int, Result]
) -> Failure | None:
    """Return the failure of a test; None if no rank failed.

    Args:
        outcomes: The outcome of each rank.
        places: The places at which the other ranks were at the moment of the first failure.
        results: The reports of the ranks that did not fail.
    """
    outcomes = _align(outcomes)
    first = find_first_failure(outcomes.values())
    error = make_rank_error(outcomes.values())
    if first is None or error is None:
        return None
    same = {each.rank for each in find_same_failures(outcomes.values(), first)}
    if first.error is not None:
        same |= {rank for rank, each in outcomes.items() if _identify(each) == _identify(first)}
    lines: dict[str, list[int]] = {}
    for rank, outcome in outcomes.items():
        if rank == first.rank:
            continue
        if rank in places:
            state = f"at that moment: {places[rank]}"
        elif rank in same:
            state = "failed in the same way"
        elif rank in results and outcome.error is None:
            state = summarize(results[rank])
        else:
            state = describe_end(outcome, "also ")
        lines.setdefault(state, []).append(rank)
    details = first.error or {}
    return Failure(
        sentence=str(error),
        rank=first.rank,
        others=tuple(f"{format_numbered('rank', ranks)} {state}" for state, ranks in lines.items()),
        report=details.get("report"),
        kind=details.get("class", ""),
    )


def _align(outcomes: Mapping[int, Outcome]) -> dict[int, Outcome]:
    """Count the lowest of the ranks that failed in the same place as the first to fail."""
    first = find_first_failure(outcomes.values())
    if first is None or first.error is None:
        return dict(outcomes)
    kind = (first.error["type"], first.error["where"])
    when = first.error["time"]
    return {
        rank: replace(each, error={**each.error, "time": when})
        if each.error is not None and (each.error["type"], each.error["where"]) == kind
        else each
        for rank, each in outcomes.items()
    }


def _identify(outcome: Outcome) -> object:
    """Return a value that is equal for ranks that failed in the same way; None for no failure."""
    error = outcome.error
    return None if error is None else (error["type"], error["where"], error["message"])


def summarize(result: Result) -> str:
    """Return the outcome of a test in a rank in which it did not fail."""
    if result.outcome == "killed":
        return "was killed by pytest_lockstep.kill"
    return result.outcome + (f" ({result.reason})" if result.reason else "")


def drop_outer_frames(report: str) -> str:
    """Return a report of the hang monitor without the frames in which pytest calls a test."""
    lines = []
    is_outer = False
    for line in report.splitlines():
        is_outer = line.startswith(" ") and (is_outer or OUTER.match(line) is not None)
        if not is_outer:
            lines.append(line)
    return "\n".join(lines)
