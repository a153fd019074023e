"""The checks of the doctor: functions that yield results for the requirements of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CheckResult", "CheckVerdict", "Requirements", "bad", "good", "note"]

CheckVerdict = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Args:
        verdict: "bad" if a run would fail, "note" if something is worth knowing, else "good".
        subject: What was checked, such as "memory".
        what: The finding.
        advice: The action to take; "" for none.
    """

    verdict: CheckVerdict
    subject: str
    what: str
    advice: str = ""


@dataclass(frozen=True)
class Requirements:
    """The run that a machine is checked for: `ranks` ranks with `threads` threads each."""

    ranks: int = 2
    threads: int = 1


def good(subject: str, what: str) -> CheckResult:
    """Return a result with the verdict "good"."""
    return CheckResult("good", subject, what)


def note(subject: str, what: str, advice: str = "") -> CheckResult:
    """Return a result with the verdict "note": a run works despite it."""
    return CheckResult("note", subject, what, advice)


def bad(subject: str, what: str, advice: str) -> CheckResult:
    """Return a result with the verdict "bad": a run would fail."""
    return CheckResult("bad", subject, what, advice)
