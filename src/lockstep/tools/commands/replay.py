"""`lockstep replay`: computes a recorded step again and compares the bits."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from lockstep.formatting import format_quantity
from lockstep.kernel.errors import UsageError
from lockstep.messages import escape_control, log
from lockstep.tools.commands.options import json_option, printing_text, resolve_run, runs_option

if TYPE_CHECKING:
    from lockstep.record.reader import Run
    from lockstep.tools.replay.replay_comparison import Recorded, ReplayComparison

__all__ = ["command"]

POSITIVE = click.IntRange(min=1)
SHORT = 24
"""The number of characters of a digest that are shown; no float is longer."""
MOST_NAMED = 16  # the largest number of samples in a sentence


@click.command()
@click.argument("run")
@click.option(
    "--step", required=True, type=click.IntRange(min=0), help="The step to replay, from 0."
)
@click.option(
    "--microbatch", metavar="M", type=click.IntRange(min=0),
    help="Replay this micro-batch of the step alone, from 0.",
)  # fmt: skip
@click.option(
    "-n", "--nprocs", default=1, show_default=True, type=POSITIVE, help="Number of ranks."
)
@click.option(
    "--pdb", "debug", is_flag=True,
    help="Run the micro-batch under pdb, which stops where the model's forward begins.",
)  # fmt: skip
@runs_option
@json_option
def command(
    run: str,
    step: int,
    microbatch: int | None,
    nprocs: int,
    debug: bool,
    folder: str,
    as_json: bool,
) -> None:
    """Compute a step of RUN, the name or folder of a run, again and compare the bits.

    The recorded program is run with its own sources, from the nearest checkpoint to
    the step, or from its beginning if there is none before it. The number of ranks may
    differ from the recorded one. Nothing is recorded or saved by the
    trainer; files that the program writes itself are written again.

    --microbatch compares the loss of that micro-batch. On one rank it is computed
    alone, and can be inspected with --pdb.

    Exit status: 0 same bits; 1 different bits, nothing to compare with, or the replay
    failed; 2 usage error.
    """
    from lockstep.record.fingerprints import read_step_fingerprints
    from lockstep.record.reader import read_run
    from lockstep.tools.replay.recorded_program import find_base, find_obstacles, read_program
    from lockstep.tools.replay.replay_comparison import compare, find_recorded
    from lockstep.tools.replay.replay_runner import run_program
    from lockstep.tools.replay.result import ReplayRequest

    if debug and (microbatch is None or nprocs > 1):
        raise UsageError("--pdb shows one micro-batch on one rank: add --microbatch M, omit -n")
    recording = read_run(resolve_run(run, folder))
    for remark in recording.remarks:
        log(remark)
    steps = {obstacle.step: obstacle for obstacle in read_step_fingerprints(recording.folder)}
    recorded = find_recorded(recording, steps, step)
    _require_step(recording, recorded, max(steps, default=-1) + 1, step)
    _require_microbatch(recording, recorded, microbatch, step)
    _require_ranks(recording, nprocs)
    program = read_program(recording, step)
    base = find_base(recording, step)
    for obstacle in find_obstacles(recording, step, program, base):
        log(obstacle)
    request = ReplayRequest(
        recording.folder,
        step,
        step,
        nprocs,
        microbatch=microbatch,
        debug=debug,
    )
    shown = escape_control(run)
    ranks = format_quantity(nprocs, "rank")
    click.echo(f"replaying step {step} of {shown} on {ranks}, from {base}", err=True)
    replay = run_program(program, base, request)
    result = compare(request, recorded, replay)
    with printing_text(as_json, result.plain):
        _print(result)
    sys.exit(0 if result.equal else 1)


def _require_step(run: Run, recorded: Recorded, count: int, step: int) -> None:
    """Raise UsageError unless a run has a step, or stopped in it."""
    if recorded.step is not None or recorded.failure:
        return
    if step == count and run.state in ("failed", "died", "stopped"):
        return  # the record says nothing about this step, but a replay can show it
    if not count:
        raise UsageError(f"{run.folder} has no finished step, so there is none to replay")
    raise UsageError(
        f"--step {step}: the record of {run.folder} has no such step; the last one is {count - 1}"
    )


def _require_microbatch(run: Run, recorded: Recorded, microbatch: int | None, step: int) -> None:
    """Raise UsageError unless the step has the requested micro-batch."""
    if microbatch is None:
        return
    count = len(recorded.step.losses) if recorded.step is not None else 0
    count = count or int(run.layout.get("microbatches") or 0)
    if count and microbatch >= count:
        raise UsageError(
            f"--microbatch {microbatch}: step {step} has {count} micro-batches; the last one is "
            f"{count - 1}"
        )


def _require_ranks(run: Run, nprocs: int) -> None:
    """Raise UsageError if some ranks would have no micro-batch."""
    count = run.layout.get("microbatches")
    if count and nprocs > count:
        raise UsageError(
            f"-n {nprocs}: the steps of {run.folder} have {count} micro-batches, and each rank "
            f"needs at least one: use -n {count} or fewer"
        )


def _print(result: ReplayComparison) -> None:
    """Print the result, and the last lines of a program that failed."""
    from lockstep.tools.report.terminal import print_sentences, print_table

    request = result.request
    recorded = result.recorded
    replay = result.replay
    what = f"step {request.first}"
    if request.microbatch is not None:
        what += f", micro-batch {request.microbatch}"
    plain = result.plain()
    rows = []
    for name in ("loss", "norm", "digest"):
        row = [_cell(plain, key) for key in (name, f"recorded_{name}")]
        if any(row):
            rows.append([name, *row])
    if rows and not replay.is_left:
        print_table([what, "replayed", "recorded"], rows)
        click.echo()
    if replay.is_left:
        said = f"{what}: left the debugger, so nothing was compared"
    elif not result.compared and not result.differences:
        why = f" ({recorded.failure})" if recorded.failure else ""
        said = f"{what}: computed, but not compared: the run ended in this step{why}"
    elif not result.equal:
        said = f"{what}: different: {'; '.join(result.differences)}"
    elif recorded.failure:
        said = f"{what}: the recorded run stopped here too ({recorded.failure})"
    else:
        said = f"{what}: the same bits (compared: {', '.join(result.compared)})"
    sentences = [said]
    if result.replayed is not None and (samples := result.replayed.samples):
        more = ", ..." if len(samples) > MOST_NAMED else ""
        listed = ", ".join(map(str, samples[:MOST_NAMED]))
        sentences.append(f"Samples of the micro-batch: {listed}{more}")
    print_sentences(*(f"{sentence}." for sentence in sentences))
    if replay.details and result.replayed is None and not recorded.failure:
        click.echo(f"\n{escape_control(replay.details)}", err=True)


def _cell(plain: Mapping[str, Any], name: str) -> str:
    """Return a number or the beginning of a digest as text; "" if there is none."""
    value = plain[name] if plain[name] is not None else plain.get(f"{name}_hex")
    return "" if value is None else str(value)[:SHORT]
