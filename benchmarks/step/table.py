"""The tables of whole steps: one line per contender, then digests and the cost of exactness."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.rank_processes import quantile
from benchmarks.step.answers import LIMIT
from benchmarks.step.comparison import ALONE, COPIES, MEMCPY, Outcome
from benchmarks.step.contenders import CONTENDERS
from benchmarks.step.exactness import Exactness
from benchmarks.step.networks import count
from benchmarks.step.widths import Digests

__all__ = [
    "beyond", "caption", "exactness_line", "heading", "records", "rows", "widths_lines", "wrong",
]  # fmt: skip

STOCK = "stock-"
PEER = "ddp-gloo"
COLUMNS = ("contender", "step", "p10", "p90", "beyond", "of ddp-gloo's", "faster",
           "MB/rank", "MB/host", "digest", "error")  # fmt: skip
WIDTHS = (18, 9, 9, 9, 9, 15, 8, 9, 9, 12, 10)
SHOWN = 8  # letters of a digest


def heading(outcomes: list[Outcome]) -> str:
    """Return what stands above a case's lines."""
    case = outcomes[0].case
    ranks = outcomes[0].ranks
    passes = f"{case.microbatches} micro-batch" + ("es" if case.microbatches > 1 else "")
    return (
        f"# {case.network}, {case.optimizer}: {case.net.sentence}; {ranks} ranks, "
        f"{case.samples} samples per rank in {passes}\n{line(COLUMNS)}"
    )


def rows(outcomes: list[Outcome]) -> list[str]:
    """Return a line for each contender."""
    return [row(outcome, outcomes) for outcome in outcomes]


def row(outcome: Outcome, outcomes: list[Outcome]) -> str:
    """Return one contender's line."""
    if outcome.error:
        return line((outcome.name,)) + f"  error: {outcome.error}"
    more = beyond(outcome, outcomes)
    answer = outcome.answer
    return line(
        (
            outcome.name,
            *(milliseconds(outcome.quantile(share)) for share in (0.5, 0.1, 0.9)),
            "-" if more is None else f"{1e3 * more:+.1f}",
            number(share_of_peer(outcome, outcomes)),
            number(speedup(outcome, outcomes)),
            f"{outcome.rank_bytes / 1e6:.0f}",
            f"{outcome.host_bytes / 1e6:.0f}",
            answer.digest[:SHOWN] + (" =" if answer.same else "  ") if answer else "-",
            f"{answer.error:.1g}" if answer else "-",
        )
    )


def line(cells: Iterable[str]) -> str:
    """Return cells in their columns; the contender's name is ranged left."""
    padded = [
        f"{cell:<{width}}" if column == COLUMNS[0] else f"{cell:>{width}}"
        for cell, width, column in zip(cells, WIDTHS, COLUMNS, strict=False)  # a short line is fine
    ]
    return "".join(padded).rstrip()


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds."""
    return f"{1e3 * seconds:.1f}" if seconds >= 0.01 else f"{1e3 * seconds:.2f}"


def number(value: float | None) -> str:
    """Return a share, or a dash where there is none."""
    return "-" if value is None else f"{value:.2f}"


def baseline(outcome: Outcome) -> str:
    """Return the name of the copies that a contender is compared with."""
    return STOCK + COPIES if outcome.name.startswith(STOCK) else COPIES


def named(name: str, outcomes: list[Outcome]) -> Outcome | None:
    """Return the outcome of that name, if it was measured."""
    return next((each for each in outcomes if each.name == name and each.times), None)


def beyond(outcome: Outcome, outcomes: list[Outcome]) -> float | None:
    """Return the seconds beyond those of the copies that run at the same time."""
    copies = named(baseline(outcome), outcomes)
    if copies is None or outcome.name in (ALONE, MEMCPY, copies.name):
        return None
    return outcome.median - copies.median


def share_of_peer(outcome: Outcome, outcomes: list[Outcome]) -> float | None:
    """Return the time beyond the copies as a share of that of DistributedDataParallel on Gloo."""
    peer = named(PEER, outcomes)
    theirs = beyond(peer, outcomes) if peer else None
    mine = beyond(outcome, outcomes)
    return None if mine is None or not theirs or theirs < 0 else mine / theirs


def speedup(outcome: Outcome, outcomes: list[Outcome]) -> float | None:
    """Return how many times as long DistributedDataParallel on Gloo takes for a whole step."""
    peer = named(PEER, outcomes)
    trains = outcome.name in CONTENDERS and CONTENDERS[outcome.name].average
    return peer.median / outcome.median if peer and trains else None


def caption(ranks: int) -> str:
    """Return the explanation of the columns, shown under the tables."""
    return (
        "step, p10, p90, beyond: milliseconds; median, 10th and 90th percentile of the step of the "
        f"slowest rank\nbeyond: minus the step of {ranks} simultaneous copies without "
        f"communication ({STOCK}*: of {STOCK}copies); faster: the step of {PEER} divided by this "
        "one\nA minus B: median difference of their blocks of the same round, its interval with a "
        "confidence of 95%, and both as multiples of a memcpy step\n"
        "MB: peak memory while training, minus that of an idle rank; shared memory counts "
        "once\ndigest: of the parameters after two steps; =: the bits of one process of plain "
        "PyTorch\nerror: distance of the parameters from those of plain PyTorch, relative to the "
        f"distance that those moved\nall but {STOCK}* keep freed memory, as lockstep.init does"
    )


def exactness_line(result: Exactness) -> str:
    """Return the cost of adding along the tree in one case."""
    exact, any_order = map(statistics.median, (result.exact, result.any_order))
    return (
        f"{result.case.network}: gradients added along the tree {milliseconds(exact)} ms, in any "
        f"order {milliseconds(any_order)} ms: {100 * result.cost:+.0f}% "
        f"({result.ranks} ranks, {result.backend})"
    )


def widths_lines(found: list[Digests]) -> list[str]:
    """Return a line for each case and contender: its digests on 1, 2, ... ranks."""
    return [
        f"{each.case.network}, {each.case.optimizer}, {each.contender}: "
        f"plain {each.plain[:SHOWN]}, "
        + ", ".join(f"{ranks}: {digest[:SHOWN]}" for ranks, digest in each.by_ranks.items())
        + ("  all equal" if each.are_equal else "  DIFFERENT")
        for each in found
    ]


def wrong(outcomes: Iterable[Outcome], found: Iterable[Digests]) -> list[str]:
    """Return who has parameters that it may not have, with the case."""
    names = [
        f"{each.name} ({each.case.network}, {each.case.optimizer})"
        for each in outcomes
        if each.answer
        and (
            each.answer.error > LIMIT or (CONTENDERS[each.name].guaranteed and not each.answer.same)
        )
    ]
    return names + [
        f"{each.contender} on {', '.join(map(str, each.by_ranks))} ranks "
        f"({each.case.network}, {each.case.optimizer})"
        for each in found
        if not each.are_equal
    ]


def records(
    outcomes: list[Outcome],
    costs: list[Exactness],
    found: list[Digests],
    about: dict[str, str],
) -> list[dict[str, Any]]:
    """Return all that was measured as objects of the JSON file."""
    cases = list(dict.fromkeys((each.case, each.ranks) for each in outcomes))
    steps = [
        record(each, group)
        for case in cases
        for group in [[each for each in outcomes if (each.case, each.ranks) == case]]
        for each in group
        if each.times
    ]
    sums = [cost_record(each) for each in costs]
    digests = [
        {
            "benchmark": "step digests",
            **{
                key: getattr(each.case, key)
                for key in ("network", "optimizer", "samples", "microbatches")
            },
            "contender": each.contender,
            "plain": each.plain,
            "ranks": {str(ranks): digest for ranks, digest in each.by_ranks.items()},
            "equal": each.are_equal,
        }
        for each in found
    ]
    return [{**each, **about} for each in (*steps, *sums, *digests)]


def record(outcome: Outcome, group: list[Outcome]) -> dict[str, Any]:
    """Return one contender's object."""
    case = outcome.case
    more = beyond(outcome, group)
    answer = outcome.answer
    return {
        "benchmark": "step",
        "contender": outcome.name,
        "network": case.network,
        "parameters": count(case.net),
        "optimizer": case.optimizer,
        "nprocs": outcome.ranks,
        "samples": case.samples,
        "microbatches": case.microbatches,
        "steps": len(outcome.times),
        **times(outcome.times),
        "beyond_ms": None if more is None else round(1e3 * more, 3),
        "share_of_ddp_gloo": rounded(share_of_peer(outcome, group)),
        "speedup": rounded(speedup(outcome, group)),
        "memory_rank_bytes": outcome.rank_bytes,
        "memory_host_bytes": outcome.host_bytes,
        "digest": answer.digest if answer else None,
        "exact": answer.same if answer else None,
        "error": answer.error if answer else None,
    }


def cost_record(cost: Exactness) -> dict[str, Any]:
    """Return the object of the cost of exactness in one case."""
    return {
        "benchmark": "exactness",
        "network": cost.case.network,
        "nprocs": cost.ranks,
        "backend": cost.backend,
        "exact": times(sorted(cost.exact)),
        "any_order": times(sorted(cost.any_order)),
        "cost": rounded(cost.cost),
    }


def times(seconds: list[float]) -> dict[str, float]:
    """Return median, p10 and p90 in milliseconds of ascending seconds."""
    shares = {"median_ms": 0.5, "p10_ms": 0.1, "p90_ms": 0.9}
    return {name: round(1e3 * quantile(seconds, share), 3) for name, share in shares.items()}


def rounded(value: float | None) -> float | None:
    """Return a share with four places."""
    return None if value is None else round(value, 4)
