"""The checks of the doctor: functions that yield results for the requirements of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CheckResult", "Requirements", "Verdict", "bad", "good", "note"]

Verdict = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Args:
        verdict: "bad" if a run would fail, "note" if something is worth knowing, else "good".
        subject: What was checked, such as "memory".
        what: What was found.
        advice: What to do about it.
    """

    verdict: Verdict
    subject: str
    what: str
    advice: str = ""


@dataclass(frozen=True)
class Requirements:
    """The run that a machine is checked for: `ranks` ranks with `threads` threads each."""

    ranks: int = 2
    threads: int = 1


def good(subject: str, what: str) -> CheckResult:
    """Return the result of a passed check."""
    return CheckResult("good", subject, what)


def note(subject: str, what: str, advice: str = "") -> CheckResult:
    """Return a result that is worth knowing, without which a run would still work."""
    return CheckResult("note", subject, what, advice)


def bad(subject: str, what: str, advice: str) -> CheckResult:
    """Return the result of a failed check."""
    return CheckResult("bad", subject, what, advice)
