"""`lockstep check`: does a script give the same bits in every layout, and if not, where not."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING

import click

from lockstep.messages import escape_control

if TYPE_CHECKING:
    from lockstep.check.comparison import Comparison, Verdict

__all__ = ["command"]

COLUMNS = ("layout", "digest", "last loss", "seconds", "verdict")
SHORT = 12
"""Characters of a digest in the table."""


def numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Return the numbers of ranks in "1,2,3" in ascending order, each once."""
    words = [word.strip() for word in value.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{value!r} is not a list of numbers of ranks, such as 1,2,3")
    return tuple(sorted({int(word) for word in words}))


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
)
@click.option(
    "--steps", default=5, show_default=True, type=click.IntRange(min=1),
    help="Steps of each trainer, after which a run ends.",
)  # fmt: skip
@click.option(
    "--ranks", default="1,2,3", show_default=True, metavar="N,N,...", callback=numbers,
    help="Numbers of ranks that hold the whole model; the lowest is the reference.",
)  # fmt: skip
@click.option(
    "--timeout", default=300.0, show_default=True,
    type=click.FloatRange(min=0, min_open=True), help="Seconds that each layout may take.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    steps: int,
    ranks: tuple[int, ...],
    timeout: float,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT in several layouts, and compare what it computes bit for bit.

    SCRIPT is run unchanged, with its ARGUMENTS, on 1, 2 and 3 ranks, on each backend,
    and, where the model allows it, in pipeline stages and with shared parameters. Each
    run ends after a few training steps. Where a layout gives other bits, the first
    step, module and parameter that differ are named.

    Options of this command may stand before or after SCRIPT; others are the script's.
    After "--" all are the script's.

    Exit status: 0 all layouts agree, 1 some layout differs or fails, 2 usage error.
    """
    from lockstep.check.comparison import compare_layouts

    found = compare_layouts(script, arguments, steps, ranks, timeout, _report)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        _print(found, script, steps)
    if as_json:
        click.echo(json.dumps(found.plain()))
    sys.exit(0 if found.equal else 1)


def _report(verdict: Verdict) -> None:
    """Tell on standard error that a layout is done."""
    run = verdict.run
    click.echo(f"{run.name}: {verdict.word}, {run.seconds:.1f} s", err=True)


def _print(found: Comparison, script: str, steps: int) -> None:
    """Print the table, and below it what needs a sentence."""
    from lockstep.report.terminal import print_table, wrap

    click.echo()
    print_table(COLUMNS, [_row(each) for each in found.verdicts], optional=("seconds",))
    click.echo()
    for sentence in _sentences(found, script, steps):
        click.echo("\n".join(wrap(sentence)))
    details = next((each.run.details for each in found.verdicts if each.word == "failed"), "")
    if details:
        click.echo(f"\n{escape_control(details)}", err=True)


def _row(verdict: Verdict) -> list[str]:
    run = verdict.run
    loss = f"{float.fromhex(run.losses[-1]):.6g}" if run.losses else ""
    return [run.name, (run.digest or "")[:SHORT], loss, f"{run.seconds:.1f}", verdict.word]


def _sentences(found: Comparison, script: str, steps: int) -> list[str]:
    """Say what the table does not: why, where and what to do next."""
    from lockstep.check.sentences import advice, sentence

    reference = found.verdicts[0].run
    failures: dict[str, Verdict] = {}  # several layouts may fail alike
    for each in found.verdicts:
        if each.run.failure:
            failures.setdefault(each.run.failure, each)
    said = [f"{each.run.name}: {each.word}: {text}" for text, each in failures.items()]
    trainers = len(reference.ranks[0].trainers)
    if (first := found.first) is not None and first.difference is not None:
        said.append(f"{first.run.name}: {sentence(first.difference, trainers)}.")
        if found.unstable is not None:
            said.append(
                f"Two runs of {reference.name} differ as well: "
                f"{sentence(found.unstable, trainers)}. So the script itself is not reproducible. "
                f"{advice(found.unstable)}"
            )
        else:
            said.append(advice(first.difference))
    if not reference.is_complete:
        return said
    taken = len(reference.losses)
    if taken < steps * trainers:
        said.append(f"{script} ended by itself after {taken} of {steps * trainers} steps.")
    if found.equal:
        count = sum(each.word == "equal" for each in found.verdicts)
        said.append(
            f"{script} computes the same bits in all {count + 1} layouts, for {taken} steps."
        )
    return said
