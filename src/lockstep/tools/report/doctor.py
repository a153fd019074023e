"""The doctor, which checks whether this machine meets the requirements of a run.

    Requirements ──> checks ──> CheckResults (good, note, bad) ──┬─> lines on the terminal
                                                                 └─> a block for an issue

A check that raises an exception is reported as a bad result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    software,
)
from lockstep.version import VERSION

__all__ = ["CHECKS", "clean", "issue_block", "run_checks"]

Check = Callable[[Requirements], Iterable[CheckResult]]

# The checks in order, with the name that is shown while a check runs.
CHECKS: dict[str, Check] = {
    "python": software.check_python,
    "torch": software.check_torch,
    "cores": machine.check_cores,
    "memory": machine.check_memory,
    "shared memory": machine.check_shared_memory,
    "disk": machine.check_disk,
    "interface": communication.check_interfaces,
    "compiler": software.check_compiler,
    "gpu": software.check_gpus,
    "backend": communication.check_native,
    "backends": communication.check_backends,
}


def run_checks(
    requirements: Requirements,
    checks: Mapping[str, Check] | None = None,
    before_check: Callable[[str], None] = lambda name: None,
) -> Iterator[CheckResult]:
    """Yield the results of all checks.

    Args:
        requirements: The run that the machine is checked for.
        checks: The checks by name. None: `CHECKS`.
        before_check: Called with the name of each check before it runs.
    """
    for name, check in (CHECKS if checks is None else checks).items():
        before_check(name)
        try:
            yield from map(_clean, check(requirements))
        except Exception as error:
            what = f"the check failed with {type(error).__name__}: {error}"
            yield _clean(bad(name, what, "report this with the block below"))


def clean(results: Iterable[CheckResult]) -> Iterator[CheckResult]:
    """Yield results without secrets and control characters."""
    return map(_clean, results)


def _clean(result: CheckResult) -> CheckResult:
    """Return a result without secrets and control characters."""
    what, advice = (escape_control(redact(text)) for text in (result.what, result.advice))
    return replace(result, what=what, advice=advice)


def issue_block(results: Iterable[CheckResult]) -> str:
    """Return the results as Markdown for an issue, with "~" for the home folder."""
    lines = [f"lockstep {VERSION} doctor", ""]
    lines += [f"{one.verdict:<5} {one.subject}: {one.what}" for one in results]
    variables = recorded_variables(os.environ)
    lines += [f"      {name}={value}" for name, value in variables.items()]
    home = str(Path.home())
    text = "\n".join(lines)
    return f"```\n{text.replace(home, '~' if len(home) > 1 else home)}\n```"
