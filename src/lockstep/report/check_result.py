"""What the doctor finds: one line a finding, with what to do where something is to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Question", "Verdict", "bad", "good", "note"]

Verdict = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """`verdict` on `subject`: `what` was found, and `advice` on what to do about it.

    "bad" is what would break a run; "note" is worth knowing.
    """

    verdict: Verdict
    subject: str
    what: str
    advice: str = ""


@dataclass(frozen=True)
class Question:
    """What the doctor is asked: would `ranks` ranks of `threads` threads work here?"""

    ranks: int = 2
    threads: int = 1


def good(subject: str, what: str) -> Finding:
    """Return a finding that all is well."""
    return Finding("good", subject, what)


def note(subject: str, what: str, advice: str = "") -> Finding:
    """Return a finding that is worth knowing and breaks nothing."""
    return Finding("note", subject, what, advice)


def bad(subject: str, what: str, advice: str) -> Finding:
    """Return a finding that would break a run."""
    return Finding("bad", subject, what, advice)
