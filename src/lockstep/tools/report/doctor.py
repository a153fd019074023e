"""The doctor, which checks whether this machine meets the requirements of a run.

    Requirements ──> checks ──> CheckResults (good, note, bad) ──> lines on the terminal, JSON

The lines are what a person pastes into an issue: they contain no secrets and no home folder.

A check that raises an exception is reported as a bad result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from lockstep.messages import escape_control
from lockstep.record.run_environment import recorded_variables
from lockstep.redaction import redact
from lockstep.tools.report.checks import (
    CheckResult,
    Requirements,
    bad,
    communication,
    machine,
)

__all__ = ["CHECKS", "hide_home", "list_variables", "run_checks"]

Check = Callable[[Requirements], Iterable[CheckResult]]

CHECKS: tuple[Check, ...] = (
    machine.check_python,
    machine.check_torch,
    machine.check_cores,
    machine.check_memory,
    machine.check_accelerators,
    communication.check_native,
    communication.check_backends,
)


def run_checks(requirements: Requirements) -> Iterator[CheckResult]:
    """Yield the results of all checks, for a run with these requirements."""
    for check in CHECKS:
        try:
            yield from map(_clean, check(requirements))
        except Exception as error:
            what = f"the check failed with {type(error).__name__}: {error}"
            yield _clean(bad(check.__name__, what, "report this with the output of this command"))


def _clean(result: CheckResult) -> CheckResult:
    """Return a result without secrets and control characters."""
    what, advice = (escape_control(redact(text)) for text in (result.what, result.advice))
    return replace(result, what=what, advice=advice)


def list_variables() -> list[str]:
    """Return the environment variables that may matter to a run, as NAME=value."""
    return [f"{name}={value}" for name, value in recorded_variables(os.environ).items()]


def hide_home(text: str) -> str:
    """Return a text with "~" for the home folder."""
    home = str(Path.home())
    return text.replace(home, "~" if len(home) > 1 else home)
