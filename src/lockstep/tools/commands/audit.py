"""`lockstep audit`: computes recorded steps again on this machine and compares the bits."""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING

import click

from lockstep.formatting import format_quantity
from lockstep.kernel.errors import UsageError
from lockstep.messages import escape_control, log
from lockstep.tools.commands.options import json_option, printing_text, resolve_run, runs_option

if TYPE_CHECKING:
    from lockstep.tools.replay.record_audit import RecordAudit
    from lockstep.tools.replay.recorded_run import RecordedRun

__all__ = ["command"]

RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@click.command()
@click.argument("run")
@click.option(
    "--steps", metavar="A-B",
    help="The steps to compute, from 0: 40-99, or a single one.  [default: the steps since the "
    "last checkpoint]",
)  # fmt: skip
@runs_option
@json_option
def command(run: str, steps: str | None, folder: str, as_json: bool) -> None:
    """Check whether this machine computes the recorded bits of RUN (name or folder).

    The recorded program is run with its own sources on one process, from the nearest
    checkpoint before the steps. Losses and gradient norms are compared in every step,
    digests of the weights at checkpoints and at the end. A step that differs is
    computed once more: the result says whether this machine agrees with itself, where
    the bits differ first, and which machine recorded them.

    Exit status: 0 same bits; 1 different bits, or the steps could not be computed;
    2 usage error.
    """
    from lockstep.tools.replay.record_audit import audit_record
    from lockstep.tools.replay.recorded_run import read_recorded_run

    recorded = read_recorded_run(resolve_run(run, folder), run)
    for remark in recorded.run.remarks:
        log(remark)
    first, last = _choose_steps(recorded, steps)
    what = f"steps {first} to {last}" if first < last else f"step {first}"
    click.echo(f"computing {what} of {escape_control(run)} again", err=True)
    result = audit_record(recorded, first, last, log)
    with printing_text(as_json, result.plain):
        _print(result, what)
    sys.exit(0 if result.verdict == "same" else 1)


def _choose_steps(run: RecordedRun, steps: str | None) -> tuple[int, int]:
    """Return the first and the last step to compute; raise UsageError if the run lacks them."""
    from lockstep.tools.replay.recorded_program import find_base

    if not run.steps:
        raise UsageError(f"{run.folder} has no finished step, so there is nothing to compute again")
    newest = run.steps[-1].step
    if steps is None:
        return min(find_base(run.run, newest).steps, newest), newest
    match = RANGE.fullmatch(steps)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"--steps {steps}: give a step or a range of steps, such as 40-99")
    first = int(match[1])
    last = int(match[2] or match[1])
    if last > newest:
        raise UsageError(
            f"--steps {steps}: {run.folder} has {newest + 1} steps; the last one is {newest}"
        )
    return first, last


def _print(result: RecordAudit, what: str) -> None:
    """Print the machines and the result."""
    from lockstep.tools.report.terminal import print_sentences, print_table

    columns = [{name: _cell(value) for name, value in side.items()} for side in result.machines]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    print_table(["", "recorded on", "this machine"], [row for row in rows if row[1] or row[2]])
    click.echo()
    difference = result.difference
    sentences = list[str]()
    if result.verdict == "same":
        digests = ", ".join(map(str, result.digests))
        compared = f"; digests of the weights after {digests} steps" if digests else ""
        said = f"this machine computes the recorded bits ({format_quantity(result.steps, 'step')}"
        sentences.append(f"{what}: {said}{compared})")
    elif difference is None:
        step = result.first + result.steps
        sentences.append(f"{what}: step {step} was not computed: {result.failure}")
        sentences.append(f"See lockstep replay {shlex.quote(result.run.name)} --step {step}")
    else:
        number = "" if difference.microbatch is None else f" {difference.microbatch}"
        sentences.append(
            f"step {difference.step}: different: the {difference.what}{number} is {difference.b} "
            f"here; the record has {difference.a}"
        )
        others = [row[0] for row in rows[1:] if row[1] != row[2]]
        if result.verdict == "unstable":
            why = "this machine computes wrong now and then, or the program is not deterministic"
        elif others:
            why = f"the machines differ ({', '.join(others)}): audit it on one like the recorded"
        else:
            why = "one of these machines, of the same kind, computes wrong"
        bits = "different" if result.verdict == "unstable" else "the same"
        sentences.append(f"Computed twice here, with {bits} bits: {why}")
    for finding in result.run.run.findings:
        sentences.append(f"The run itself recorded: {finding.get('message')}")
    print_sentences(*(f"{sentence}." for sentence in sentences))


def _cell(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")
