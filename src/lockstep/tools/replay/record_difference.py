"""The first difference between two records, found by pure functions without a replay.

    batch of step k           its samples, or their order
    losses of step k          micro-batch by micro-batch
    loss and norm of step k   the batch's
    digest after step k       if both have one: at checkpoints and at the end

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
    "find_window",
    "first_record_difference",
    "replay_differences",
    "step_differences",
]


Identified = RecordedStep | ReplayedStep
"""A step with the values that identify it."""


@dataclass(frozen=True)
class RecordDifference:
    """A difference between the same step of two records.

    Attributes:
        step: The number of the step.
        what: "batch", "loss of the micro-batch", "loss", "norm" or "digest".
        microbatch: The micro-batch; None if the difference is about the whole batch.
        a: The value of the first record, as text; "none" if it was not computed.
        b: The value of the second record.
    """

    step: int
    what: str
    microbatch: int | None
    a: str
    b: str


def first_record_difference(
    a: Sequence[RecordedStep], b: Sequence[RecordedStep]
) -> RecordDifference | None:
    """Return the first difference among the steps that both records have; None if there is none.

    Values that only one of them recorded are not compared.

    Args:
        a: The finished steps of the first record.
        b: The finished steps of the second record.
    """
    theirs = {step.step: step for step in b}
    pairs = ((step, theirs[step.step]) for step in a if step.step in theirs)
    return next((found for pair in pairs for found in step_differences(*pair)), None)


def find_window(
    a: Mapping[int, str], b: Mapping[int, str], difference: RecordDifference | None
) -> tuple[int, int] | None:
    """Return the first and the last of the steps among which the difference of two records arises.

    The weights before the first one are equal, or unknown; the records differ in the last one, or
    after it. None if the records agree.

    Args:
        a: The digests of the first record, by the number of finished steps.
        b: The digests of the second record, by the number of finished steps.
        difference: The first step that differs; None if no step does.
    """
    common = sorted(a.keys() & b.keys())
    differing = next((count for count in common if a[count] != b[count]), None)
    if differing is not None and (difference is None or differing <= difference.step):
        last = max(differing - 1, 0)
    elif difference is not None:
        last = difference.step
    else:
        return None
    return max(
        (count for count in common if count <= last and a[count] == b[count]), default=0
    ), last


def replay_differences(
    recorded: RecordedStep | None, digest: str | None, replayed: ReplayedStep
) -> Iterator[RecordDifference]:
    """Yield the differences between a replayed step and the record.

    Args:
        recorded: The step in the record; None if it has none.
        digest: The recorded digest of the weights after it; None for none.
        replayed: The step as the replay computed it.
    """
    if recorded is not None:
        yield from step_differences(recorded, replayed)
    if digest is not None and digest != replayed.digest:
        yield RecordDifference(replayed.step, "digest", None, digest, replayed.digest)


def step_differences(a: Identified, b: Identified) -> Iterator[RecordDifference]:
    """Yield the differences between the same step of two computations."""
    if a.batch is not None and b.batch is not None and a.batch != b.batch:
        yield RecordDifference(a.step, "batch", None, a.batch, b.batch)
    if a.losses and b.losses:
        pairs = [(_text(x), _text(y)) for x, y in zip_longest(a.losses, b.losses)]
        for number, (x, y) in enumerate(pairs):
            if x != y:
                what = "loss of the micro-batch"
                yield RecordDifference(a.step, what, number, x, y)
    for what in ("loss", "norm"):
        ours = getattr(a, what)
        theirs = getattr(b, what)
        if None not in (ours, theirs) and _text(ours) != _text(theirs):
            yield RecordDifference(a.step, what, None, _text(ours), _text(theirs))


def _text(value: float | None) -> str:
    """Return a number as text that is read back with the same bits; "none" for None."""
    return "none" if value is None else repr(value)
