"""The tables of pipelines: a line a contender, and the time of a micro-batch beyond computing."""

from __future__ import annotations

from typing import Any

from benchmarks.pipeline.case import Case
from benchmarks.pipeline.comparison import Outcome, ideal
from benchmarks.pipeline.contenders import ALONE, COPIES, STAGES

__all__ = ["caption", "heading", "overhead_lines", "records", "rows"]

COLUMNS = ("contender", "batch", "p10", "p90", "samples/s", "speedup", "of ideal", "answers")
WIDTHS = (18, 10, 10, 10, 11, 9, 9, 10)


def heading(case: Case) -> str:
    """Return what stands above a case's lines."""
    count = f"{case.splits} micro-batch" + ("es" if case.splits > 1 else "")
    return f"# {count}\n{line(COLUMNS)}"


def rows(outcomes: list[Outcome]) -> list[str]:
    """Return a line for each contender, and the ideal below them."""
    single = median_of(COPIES, outcomes)
    lines = [row(outcome, single) for outcome in outcomes]
    if single is not None:
        case = outcomes[0].case
        best = ideal(single, case.splits)
        shown = (spoken(best), "", "", f"{case.samples / best:.1f}", f"{single / best:.2f}", "100%")
        lines.append(line(("ideal", *shown, "")))
    return lines


def row(outcome: Outcome, single: float | None) -> str:
    """Return one contender's line."""
    if outcome.error:
        return f"{outcome.name:<{WIDTHS[0]}}  error: {outcome.error}"
    if not outcome.times:
        return f"{outcome.name:<{WIDTHS[0]}}  was not measured"
    times = (spoken(outcome.quantile(share)) for share in (0.5, 0.1, 0.9))
    speed = f"{outcome.case.samples / outcome.median:.1f}"
    gain = share = "-"
    if single is not None and is_pipeline(outcome):
        gain = f"{single / outcome.median:.2f}"
        share = f"{ideal(single, outcome.case.splits) / outcome.median:.0%}"
    return line((outcome.name, *times, speed, gain, share, answers(outcome)))


def answers(outcome: Outcome) -> str:
    """Say whether its answers were right; show a digest where one is guaranteed."""
    if outcome.wrong:
        return "WRONG"
    return outcome.digest[:8] if outcome.digest else ("-" if outcome.name == ALONE else "right")


def is_pipeline(outcome: Outcome) -> bool:
    """Whether it computes in stages."""
    return outcome.name not in (ALONE, COPIES, "lockstep-1")


def median_of(name: str, outcomes: list[Outcome]) -> float | None:
    """Return the median of the contender of that name."""
    return next((each.median for each in outcomes if each.name == name and each.times), None)


def overhead_lines(everything: list[list[Outcome]]) -> list[str]:
    """Return what one more micro-batch of the same batch costs, by contender.

    The slope between the fewest and the most micro-batches: of a tiny model it is all
    overhead, of the process alone that of the loop.
    """
    first = everything[0]
    last = everything[-1]
    more = last[0].case.splits - first[0].case.splits
    if more <= 0:
        return []
    found = ["# one more micro-batch in the same batch, microseconds"]
    for outcome in last:
        few = median_of(outcome.name, first)
        if few is not None and outcome.times:
            cost = 1e6 * (outcome.median - few) / more
            found.append(f"{outcome.name:<{WIDTHS[0]}}{cost:>{WIDTHS[1]}.1f}")
    return found


def caption(outcomes: list[Outcome]) -> str:
    """Return the explanation that is shown under the tables."""
    case = outcomes[0].case
    what = f"{case.samples} samples per batch" + (
        f", images of {case.size}x{case.size}" if case.net.pictures else ""
    )
    return (
        f"# {case.net.sentence}; {what}; {STAGES} stages with one thread each. Times are those of "
        "the slowest rank. Speedup and ideal, p m / (m + p - 1), are relative to one of the "
        "copies. Answers: right for the losses of one process; equal digests for equal bits"
    )


def records(outcomes: list[Outcome], said: dict[str, str]) -> list[dict[str, Any]]:
    """Return what is written as JSON."""
    single = median_of(COPIES, outcomes)
    return [record(outcome, single) | said for outcome in outcomes]


def record(outcome: Outcome, single: float | None) -> dict[str, Any]:
    """Return one contender's numbers in one case."""
    case = outcome.case
    found: dict[str, Any] = {
        "benchmark": "pipeline",
        "contender": outcome.name,
        "model": case.model,
        "stages": STAGES if is_pipeline(outcome) else 1,
        "microbatches": case.splits,
        "batch_size": case.samples,
        "size": case.size if case.net.pictures else None,
        "losses": outcome.losses,
        "digest": outcome.digest or None,
        "wrong": outcome.wrong or None,
        "error": outcome.error or None,
        "times": outcome.times,
    }
    if outcome.times:
        found |= {
            "median_seconds": outcome.median,
            "p10_seconds": outcome.quantile(0.1),
            "p90_seconds": outcome.quantile(0.9),
            "samples_per_second": case.samples / outcome.median,
        }
        if single is not None and is_pipeline(outcome):
            best = ideal(single, case.splits)
            found |= {"speedup": single / outcome.median, "of_ideal": best / outcome.median}
    return found


def line(cells: tuple[str, ...]) -> str:
    """Return cells in columns: the first to the left, the others to the right."""
    padded = [f"{cells[0]:<{WIDTHS[0]}}"]
    padded += [f"{cell:>{width}}" for cell, width in zip(cells[1:], WIDTHS[1:], strict=True)]
    return "".join(padded).rstrip()


def spoken(seconds: float) -> str:
    """Return a time with three digits or so."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3f} ms"
