"""The result of `lockstep chaos`: the kills, their costs, and the verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.formatting import format_duration, format_quantity
from lockstep.record.columns import Column, Line, as_dict, as_float
from lockstep.tools.check.kill_plan import PlannedKill

__all__ = ["Baseline", "ChaosResult", "Kill", "describe_baseline", "measure_kills"]


@dataclass(frozen=True)
class Baseline:
    """The digest and the durations of an undisturbed run.

    Attributes:
        folder: The folder of the run.
        digest: The digest of the final weights.
        intervals: The seconds between the lines of consecutive steps, one value per step.
        seconds: The duration of the run, in seconds.
    """

    folder: Path
    digest: str
    intervals: Column
    seconds: float


@dataclass(frozen=True)
class Kill:
    """A kill that was carried out, and its cost.

    Attributes:
        planned: The planned kill.
        member: The number of the killed member.
        rank: The rank of the member at that time.
        step: The interrupted step.
        time: The time of the kill, in Unix time.
        round: The round that began after the kill. None: no round began.
        seconds_to_repeat: The time from the kill until the repeated step began, in seconds.
        repeated_seconds: The repeated work, in seconds.
    """

    planned: PlannedKill
    member: int
    rank: int
    step: int
    time: float
    round: int | None = None
    seconds_to_repeat: float | None = None
    repeated_seconds: float | None = None

    @property
    def seconds_lost(self) -> float | None:
        """The cost of the kill, in seconds; None if it is not known."""
        if self.seconds_to_repeat is None:
            return None
        return self.seconds_to_repeat + (self.repeated_seconds or 0.0)

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = {name: value for name, value in vars(self).items() if name != "planned"}
        return values | {"part": self.planned.part, "seconds_lost": self.seconds_lost}


@dataclass(frozen=True)
class ChaosResult:
    """The results of the disturbed run and of the undisturbed one.

    Attributes:
        baseline: The undisturbed run.
        folder: The folder of the disturbed run. None: it has no folder.
        digest: The digest of the final weights of the disturbed run. None: it did not finish.
        planned: The number of planned kills.
        kills: The kills that were carried out.
        rounds: The number of rounds.
        seconds: The duration of the disturbed run, in seconds.
        seed: The seed of the plan.
        failure: The reason for its failure; "" if it succeeded.
    """

    baseline: Baseline
    folder: Path | None
    digest: str | None
    planned: int
    kills: list[Kill]
    rounds: int
    seconds: float
    seed: int
    failure: str = ""

    @property
    def equal(self) -> bool:
        """Whether the weights of both runs have the same bits."""
        return self.digest == self.baseline.digest

    @property
    def is_passed(self) -> bool:
        """Whether all kills were carried out and the weights are equal."""
        return self.equal and len(self.kills) == self.planned and not self.failure

    @property
    def seconds_lost(self) -> list[float]:
        """The known costs of the kills, in seconds."""
        return [kill.seconds_lost for kill in self.kills if kill.seconds_lost is not None]

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        lost = self.seconds_lost
        return {
            "kills": len(self.kills),
            "planned": self.planned,
            "rounds": self.rounds,
            "digest": self.digest,
            "baseline_digest": self.baseline.digest,
            "equal": self.equal,
            "median_seconds_lost": median(lost) if lost else None,
            "max_seconds_lost": max(lost, default=None),
            "seconds": self.seconds,
            "baseline_seconds": self.baseline.seconds,
            "seed": self.seed,
            "run": None if self.folder is None else str(self.folder),
            "baseline_run": str(self.baseline.folder),
            "failure": self.failure or None,
            "deaths": [kill.plain() for kill in self.kills],
        }


def describe_baseline(baseline: Baseline) -> str:
    """Return the sentence about the undisturbed run."""
    steps = format_quantity(len(baseline.intervals), "step")
    return (
        f"undisturbed: {steps} in {format_duration(baseline.seconds)}, digest {baseline.digest}, "
        f"in {baseline.folder}"
    )


def measure_kills(kills: Sequence[Kill], rounds: Sequence[Line]) -> list[Kill]:
    """Return the kills with their costs, computed from the record's lines about rounds.

    If a round ends before its line is written, the line of the next round covers both pauses.
    """
    lines = {
        as_dict(death).get("member"): line for line in rounds for death in line.get("lost") or ()
    }
    return [
        _measure_kill(kill, lines.get(kill.member) or _find_next(rounds, kill.time))
        for kill in kills
    ]


def _find_next(rounds: Sequence[Line], time: float) -> Line | None:
    return next((line for line in rounds if as_float(line.get("noticed")) >= time), None)


def _measure_kill(kill: Kill, line: Line | None) -> Kill:
    if line is None:
        return kill
    continued, undone = as_float(line.get("continued")), as_float(line.get("undone"))
    is_known = math.isfinite(continued)
    return dataclasses.replace(
        kill,
        round=line.get("round"),
        seconds_to_repeat=max(0.0, continued - kill.time) if is_known else None,
        repeated_seconds=undone if math.isfinite(undone) else None,
    )
