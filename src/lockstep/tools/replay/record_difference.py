"""The first difference between two records, found by pure functions without a replay.

    batch of step k           its samples, or their order
    losses of step k          micro-batch by micro-batch
    loss and norm of step k   the batch's
    digest after step k       if both have one: at checkpoints and at the end
    stop in step k            a non-finite value that only one run had

Losses and the norm of a step are computed before its update, so a different update only shows one
step later. A buffer that no loss depends on only shows in a digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from lockstep.record.fingerprints import RecordedStep
from lockstep.tools.replay.result import ReplayedStep

__all__ = [
    "RecordDifference",
    "SearchWindow",
    "Stop",
    "compare_records",
    "first_record_difference",
    "step_differences",
]


Identified = RecordedStep | ReplayedStep
"""A step with the values that identify it."""


@dataclass(frozen=True)
class RecordDifference:
    """A difference between the same step of two records.

    Attributes:
        step: The number of the step.
        what: "batch", "loss of the micro-batch", "loss", "norm", "digest" or "stop".
        microbatch: The micro-batch; None if the difference is about the whole batch.
        a: The value of the first record, as text; "none" if it was not computed. For a stop, the
            reason why the run stopped; "" if it continued.
        b: The value of the second record.
        is_partial: Whether some micro-batches have the same loss in both.
    """

    step: int
    what: str
    microbatch: int | None
    a: str
    b: str
    is_partial: bool = False


@dataclass(frozen=True)
class Stop:
    """A step that a run began and did not finish, because it failed there.

    Attributes:
        step: The number of the step.
        microbatch: The micro-batch; None if it is not known, or if no micro-batch is concerned.
        what: The reason of the failure: "the loss is nan", "KeyError: 'lr'".
        is_value: Whether the reason is a non-finite value, which every exact replay computes too.
    """

    step: int
    microbatch: int | None
    what: str
    is_value: bool


@dataclass(frozen=True)
class SearchWindow:
    """The steps among which the difference of two records arises.

    Attributes:
        first: The first of these steps; the states before it are equal, or unknown.
        last: The last of these steps; the records differ after it.
        is_narrow: Whether the difference is known to arise in step `last` or in the update before.
    """

    first: int
    last: int
    is_narrow: bool


def first_record_difference(
    a: Sequence[RecordedStep],
    b: Sequence[RecordedStep],
    stops: tuple[Stop | None, Stop | None] = (None, None),
) -> RecordDifference | None:
    """Return the first difference among the steps that both records have; None if there is none.

    Values that only one of them recorded are not compared.

    Args:
        a: The finished steps of the first record.
        b: The finished steps of the second record.
        stops: The step in which each run stopped; None for a run that did not fail.
    """
    theirs = {step.step: step for step in b}
    for ours in a:
        if (other := theirs.get(ours.step)) is not None:
            difference = next(step_differences(ours, other), None)
            if difference is not None:
                return difference
    return _stop_difference([step.step for step in a], [step.step for step in b], stops)


def _stop_difference(
    a: Sequence[int], b: Sequence[int], stops: tuple[Stop | None, Stop | None]
) -> RecordDifference | None:
    """Return the first step in which a non-finite value stopped only one run, or both elsewhere."""
    first, second = (stop if stop is not None and stop.is_value else None for stop in stops)
    known = [stop for stop in (first, second) if stop is not None]
    if first == second or not known:
        return None
    step = min(stop.step for stop in known)
    ours, theirs = (
        stop if stop is not None and stop.step == step else None for stop in (first, second)
    )
    if (ours is None and step not in a) or (theirs is None and step not in b):
        return None  # the other run did not get to this step
    places = [stop.microbatch for stop in (ours, theirs) if stop is not None]
    microbatch = min((number for number in places if number is not None), default=None)
    x, y = ("" if stop is None else stop.what for stop in (ours, theirs))
    return RecordDifference(step, "stop", microbatch, x, y)


def compare_records(
    a: Mapping[int, str], b: Mapping[int, str], difference: RecordDifference | None
) -> SearchWindow | None:
    """Return the steps to search for the difference of two records; None if the records agree.

    Args:
        a: The digests of the first record, by the number of finished steps.
        b: The digests of the second record, by the number of finished steps.
        difference: The first step that differs; None if no step does.
    """
    common = sorted(a.keys() & b.keys())
    differing = next((count for count in common if a[count] != b[count]), None)
    equal = [count for count in common if a[count] == b[count]]
    if differing is not None and (difference is None or differing <= difference.step):
        first = max((count for count in equal if count < differing), default=0)
        last = max(differing - 1, 0)
        return SearchWindow(first, last, first >= last)
    if difference is None:
        return None
    first = max((count for count in equal if count <= difference.step), default=0)
    return SearchWindow(max(first, difference.step - 1, 0), difference.step, is_narrow=True)


def step_differences(a: Identified, b: Identified) -> Iterator[RecordDifference]:
    """Yield the differences between the same step of two computations."""
    if a.batch is not None and b.batch is not None and a.batch != b.batch:
        yield RecordDifference(a.step, "batch", None, a.batch, b.batch)
    if a.losses and b.losses:
        pairs = [(_text(x), _text(y)) for x, y in zip_longest(a.losses, b.losses)]
        is_partial = any(x == y for x, y in pairs)
        for number, (x, y) in enumerate(pairs):
            if x != y:
                what = "loss of the micro-batch"
                yield RecordDifference(a.step, what, number, x, y, is_partial)
    for what in ("loss", "norm"):
        ours, theirs = getattr(a, what), getattr(b, what)
        if None not in (ours, theirs) and _text(ours) != _text(theirs):
            yield RecordDifference(a.step, what, None, _text(ours), _text(theirs))


def _text(value: float | None) -> str:
    """Return a number as text that is read back with the same bits; "none" for None."""
    return "none" if value is None else repr(value)
