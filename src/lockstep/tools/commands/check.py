"""`lockstep check`: compares the bits that a script computes in several layouts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from lockstep.messages import escape_control
from lockstep.tools.check.difference import LayoutDifference, describe_kind
from lockstep.tools.commands.options import (
    PASSING_ARGUMENTS,
    json_option,
    parse_rank_counts,
    printing_text,
    timeout_option,
)

if TYPE_CHECKING:
    from lockstep.tools.check.layout_comparison import LayoutComparison, LayoutVerdict

__all__ = ["command"]

COLUMNS = ("layout", "digest", "last loss", "seconds", "verdict")
SHORT = 12
"""The number of characters of a digest in the table."""

ADVICE = {
    "initial": "Call torch.manual_seed(...) before the model is built, and do not let the model "
    "or a loaded checkpoint depend on the layout.",
    "between": "Look for code that writes into the model after a step, and make it depend on "
    "the model and its optimizer alone.",
    "data": "The batch of a step must be the same in every layout. Look for random numbers "
    "without a seed or from a private generator (in the dataset, its transforms, the "
    "collate_fn or the sampler), for a DistributedSampler, and for code that depends on the rank.",
    "input": "Look for a tensor that is written in place after it was passed on.",
    "output": "The module depends on something other than its inputs, parameters and buffers. "
    "Look for state that it keeps in Python (a counter, a private generator, a value that another "
    "module left in an attribute); keep such state in a buffer, and draw random numbers from "
    "torch's default generator.",
    "loss": "Look for state that the loss function keeps in Python, and for random numbers from "
    "a private generator.",
    "gradient": "Look for backward hooks, for your own autograd functions and for random "
    "numbers that are drawn in backward.",
    "update": "Look for options of the optimizer or its schedule that differ between ranks or "
    "depend on their number.",
    "buffer": "Look for code that writes into the buffer outside of the model's forward pass.",
    "state": "Look for options of the optimizer that differ between ranks.",
    "digest": "Look for values that the model's state_dict() adds.",
    "steps": "Look for a number of steps, or of trainers, that depends on the rank or on the "
    "number of ranks.",
}
ADVICE["forward"] = ADVICE["output"]


@click.command(context_settings=PASSING_ARGUMENTS)
@click.option(
    "--steps", default=5, show_default=True, type=click.IntRange(min=1),
    help="Steps per trainer, after which a run ends.",
)  # fmt: skip
@click.option(
    "--ranks", default="1,2,3", show_default=True, metavar="N,N,...",
    help="Numbers of ranks without pipeline stages; the lowest is the reference.",
)  # fmt: skip
@timeout_option
@click.option(
    "--portable", "names_unportable", is_flag=True,
    help="Also list operators that compute other bits on another processor, even with portable "
    "arithmetic.",
)  # fmt: skip
@json_option
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    steps: int,
    ranks: str,
    timeout: float,
    names_unportable: bool,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT in several layouts, and compare what it computes bit for bit.

    SCRIPT is run unchanged, with its ARGUMENTS, on 1, 2 and 3 ranks, on each backend,
    and, where the model allows it, in pipeline stages and with shared parameters. Each
    run ends after a few training steps. If a layout computes different bits, the
    first step, module and parameter that differ are reported.

    Options of this command may be placed before or after SCRIPT; other options are
    passed to the script. After "--", all options are passed to the script.

    Exit status: 0 all layouts agree, 1 a layout differs or fails, or --portable lists an
    operator, 2 usage error.
    """
    from lockstep.tools.check.layout_comparison import compare_layouts

    counts = sorted({*parse_rank_counts("--ranks", ranks)})
    comparison = compare_layouts(script, arguments, steps, counts, timeout, _report)
    unportable: list[dict[str, str]] | None = None
    if names_unportable and comparison.verdicts[0].run.is_complete:
        from lockstep.tools.check.portability import find_unportable

        unportable = find_unportable(script, arguments, steps, timeout)
    with printing_text(as_json, lambda: comparison.plain() | {"unportable": unportable}):
        _print(comparison, script, steps)
        _print_unportable(unportable, script)
    sys.exit(0 if comparison.equal and not unportable else 1)


def _report(verdict: LayoutVerdict) -> None:
    """Report on standard error that a layout has finished."""
    run = verdict.run
    click.echo(f"{run.name}: {verdict.word}, {run.seconds:.1f} s", err=True)


def _print(comparison: LayoutComparison, script: str, steps: int) -> None:
    """Print the table and the explanations below it."""
    from lockstep.tools.report.terminal import print_sentences, print_table

    click.echo()
    print_table(COLUMNS, [_row(verdict) for verdict in comparison.verdicts], optional=("seconds",))
    click.echo()
    print_sentences(*_explain(comparison, script, steps))
    details = next(
        (verdict.run.details for verdict in comparison.verdicts if verdict.word == "failed"), ""
    )
    if details:
        click.echo(f"\n{escape_control(details)}", err=True)


def _print_unportable(unportable: Sequence[Mapping[str, str]] | None, script: str) -> None:
    """Print the operators that are not portable; None if they are not wanted."""
    from lockstep.tools.report.terminal import print_table

    if unportable:
        rows = [[entry["operator"], entry["reason"]] for entry in unportable]
        click.echo("\nOther bits on another processor, even with portable arithmetic:\n")
        print_table(("operator", "why"), rows)
    elif unportable is not None:
        click.echo(
            f"\nAll operators of {script} are of families whose bits are portable to every x86-64 "
            "processor with AVX2, with lockstep run --portable."
        )


def _row(verdict: LayoutVerdict) -> list[str]:
    run = verdict.run
    loss = f"{float.fromhex(run.losses[-1]):.6g}" if run.losses else ""
    return [run.name, (run.digest or "")[:SHORT], loss, f"{run.seconds:.1f}", verdict.word]


def _explain(comparison: LayoutComparison, script: str, steps: int) -> list[str]:
    """Return sentences about causes, locations and advice, which the table does not show."""
    reference = comparison.verdicts[0].run
    failures: dict[str, LayoutVerdict] = {}  # list each failure once: several layouts may share it
    for verdict in comparison.verdicts:
        if verdict.run.failure:
            failures.setdefault(verdict.run.failure, verdict)
    lines = [f"{one.run.name}: {one.word}: {text}" for text, one in failures.items()]
    trainers = len(reference.ranks[0].trainers)
    if (first := comparison.first) is not None and first.difference is not None:
        lines.append(f"{first.run.name}: {describe_layout_difference(first.difference, trainers)}.")
        if comparison.unstable is not None:
            lines.append(
                f"Two runs of {reference.name} differ as well: "
                f"{describe_layout_difference(comparison.unstable, trainers)}. So the script "
                f"itself is not reproducible. {ADVICE[comparison.unstable.what]}"
            )
        else:
            lines.append(ADVICE[first.difference.what])
    if not reference.is_complete:
        return lines
    taken = len(reference.losses)
    if taken < steps * trainers:
        lines.append(f"{script} ended after {taken} of {steps * trainers} steps.")
    if comparison.equal:
        count = sum(verdict.word == "equal" for verdict in comparison.verdicts)
        lines.append(
            f"{script} computes the same bits in all {count + 1} layouts, for {taken} steps."
        )
    return lines


def describe_layout_difference(difference: LayoutDifference, trainers: int = 1) -> str:
    """Return the location and kind of a difference, without a full stop.

    Args:
        difference: The difference.
        trainers: The number of trainers of the script.
    """
    location = [f"trainer {difference.trainer}"] if trainers > 1 else []
    if difference.what != "initial":
        location.append(f"step {difference.step}")
    if difference.microbatch is not None:
        location.append(f"micro-batch {difference.microbatch}")
    if difference.rank:  # another rank than 0 means that rank 0 agrees with the reference
        location.append(f"rank {difference.rank}")
    text = describe_kind(difference)
    return f"{', '.join(location)}: {text}" if location else text
