"""Progress of a benchmark: what it measures at the moment, and how long it will take."""

from __future__ import annotations

import sys
import time

import click

__all__ = ["Progress", "about", "status"]


def status(text: str) -> None:
    """Show the current activity on a terminal, on a line that the next status replaces."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def about(seconds: float) -> str:
    """Return an estimate in words."""
    return "about a minute" if seconds < 90 else f"about {round(seconds / 60)} minutes"


class Progress:
    """Shows what goes on, and how long it has taken of the estimate."""

    def __init__(self, expected: float) -> None:
        self._begun = time.monotonic()
        self._expected = expected
        self.subject = ""

    def __call__(self, what: str) -> None:
        """Show it on a terminal."""
        passed = time.monotonic() - self._begun
        clock = f"{passed // 60:.0f}:{passed % 60:02.0f}"
        status(f"[{clock} of {about(self._expected)}] {self.subject}{what} ...")
