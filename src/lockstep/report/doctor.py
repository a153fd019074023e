"""The doctor: tries out what a run needs here, and says what to do about what fails.

    checks ── Question ──> Findings (good, note, bad) ──┬─> lines, as they come
                                                        └─> a block to paste into an issue

A check that itself raises is a finding too: the doctor never falls ill.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import lockstep
from lockstep.messages import escape_control
from lockstep.record.environment import variables
from lockstep.redaction import redact
from lockstep.report import markdown
from lockstep.report.check_result import Finding, Question, bad
from lockstep.report.checks import backends, machine, network, software

__all__ = ["CHECKS", "block", "examine"]

Check = Callable[[Question], Iterable[Finding]]

# What is tried, in reading order: the name that is shown while it is tried, and the check.
CHECKS: dict[str, Check] = {
    "python": software.python,
    "torch": software.torch_build,
    "environment": network.place,
    "cores": machine.cores,
    "micro-batches": machine.microbatches,
    "memory": machine.memory,
    "memory speed": machine.memory_speed,
    "shared memory": machine.shared_memory,
    "disk": machine.disk,
    "open files": machine.open_files,
    "clock": machine.clock,
    "host name": network.host_name,
    "interface": network.interfaces,
    "ports": network.ports,
    "loopback": network.loopback,
    "compiler": software.compiler,
    "gpu": software.gpus,
    "mpi": software.mpi,
    "backends": backends.backends,
    "ranks at once": backends.together,
}


def examine(
    question: Question,
    checks: dict[str, Check] = CHECKS,
    begin: Callable[[str], None] = lambda name: None,
) -> Iterator[Finding]:
    """Yield what each check finds; `begin` is told the name of a check before it is tried."""
    for name, check in checks.items():
        begin(name)
        try:
            yield from map(shown, check(question))
        except Exception as error:
            what = f"the check failed with {type(error).__name__}: {error}"
            yield shown(bad(name, what, "report this, with the block below"))


def shown(found: Finding) -> Finding:
    """Return a finding without secrets and control characters."""
    what, advice = (escape_control(redact(text)) for text in (found.what, found.advice))
    return replace(found, what=what, advice=advice)


def block(findings: Iterable[Finding]) -> str:
    """Return the findings as Markdown, to paste into an issue; the home folder is a "~"."""
    lines = [f"lockstep {lockstep.__version__} doctor", ""]
    lines += [f"{one.verdict:<5} {one.subject}: {one.what}" for one in findings]
    found = variables(os.environ)
    lines += [f"      {name}={value}" for name, value in found.items()]
    home = str(Path.home())
    text = "\n".join(lines)
    return "\n".join(markdown.block(text.replace(home, "~" if len(home) > 1 else home)))
