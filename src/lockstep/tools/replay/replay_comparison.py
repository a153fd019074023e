"""The comparison of a replayed step with the record, bit for bit, as plain values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.record.fingerprints import RecordedStep
from lockstep.record.reader import Run
from lockstep.redaction import redact
from lockstep.tools.replay.result import Replay, ReplayedStep, ReplayRequest

__all__ = ["Recorded", "ReplayComparison", "compare", "find_recorded"]

MOST_NAMED = 8  # the largest number of micro-batches in a sentence

STOPPED_AT = re.compile(
    r"(?:rank \d+ failed: )?(?:\w+Error: )?(?:rank \d+, )?step (?P<step>\d+)"
    r"(?:, micro-batch (?P<microbatch>\d+))?: (?P<what>the [\w ]+ is -?(?:nan|inf)|[^;\n]+)"
)
"""The message of an error in a step. The rank depends on the layout; the folder follows a
semicolon."""


@dataclass(frozen=True)
class Recorded:
    """The part of a record that is about one step.

    Attributes:
        step: The step; None if the run stopped in it.
        digest: The digest of the weights after it; None if none was recorded.
        failure: The reason why the run stopped in this step: "the loss is nan", "KeyError: 'lr'";
            "" if it did not, or if the reason is not known.
        microbatch: The micro-batch where it stopped; None if it is not known.
    """

    step: RecordedStep | None
    digest: str | None = None
    failure: str = ""
    microbatch: int | None = None

    @property
    def stopped_at(self) -> float | None:
        """The non-finite loss at which the run stopped; None if it stopped for another reason."""
        loss = re.fullmatch(r"the loss is (-?(?:nan|inf))", self.failure)
        return None if loss is None else float(loss[1])


@dataclass(frozen=True)
class ReplayComparison:
    """A replayed step beside the recorded one.

    Attributes:
        request: The request for the replay.
        recorded: The step in the record.
        replay: The result of the replay.
        replayed: The step in the replay; None if it was not finished.
        differences: The differences, as phrases.
        compared: The names of the compared values.
    """

    request: ReplayRequest
    recorded: Recorded
    replay: Replay
    replayed: ReplayedStep | None
    differences: tuple[str, ...]
    compared: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the replay computed everything that was recorded."""
        return bool(self.compared) and not self.differences

    def plain(self) -> dict[str, Any]:
        """Return the object for `--json`."""
        layout, microbatch = self.request.layout, self.request.microbatch
        loss, norm = _results(self.replayed, microbatch)
        recorded_loss, recorded_norm = _results(self.recorded.step, microbatch)
        if recorded_loss is None and microbatch == self.recorded.microbatch:
            recorded_loss = self.recorded.stopped_at
        digest = None if self.replayed is None or microbatch is not None else self.replayed.digest
        return {
            "run": str(self.request.run),
            "step": self.request.first,
            "microbatch": microbatch,
            **_number("loss", loss),
            **_number("norm", norm),
            "digest": digest,
            **_number("recorded_loss", recorded_loss),
            **_number("recorded_norm", recorded_norm),
            "recorded_digest": self.recorded.digest if microbatch is None else None,
            "samples": None if self.replayed is None else self.replayed.samples,
            "equal": self.equal,
            "compared": list(self.compared),
            "differences": list(self.differences),
            "layout": {
                "world_size": layout.ranks,
                "replicas": layout.replicas,
                "stages": layout.stages,
            },
            "from_step": self.replay.base,
            "seconds": round(self.replay.seconds, 3),
            "failure": self.replay.failure or None,
        }


def find_recorded(run: Run, steps: Mapping[int, RecordedStep], number: int) -> Recorded:
    """Return the part of a run's record that is about one step.

    Args:
        run: The run.
        steps: Its committed steps, by number.
        number: The step.
    """
    if number in steps:
        return Recorded(steps[number], run.digests.get(number + 1))
    message = str((run.end or {}).get("message") or "")
    stop = STOPPED_AT.match(message)
    if stop is None or int(stop["step"]) != number:
        is_next = run.state == "failed" and number == max(steps, default=-1) + 1
        return Recorded(None, failure=message.splitlines()[0] if message and is_next else "")
    microbatch = None if stop["microbatch"] is None else int(stop["microbatch"])
    return Recorded(None, failure=stop["what"], microbatch=microbatch)


def compare(request: ReplayRequest, recorded: Recorded, replay: Replay) -> ReplayComparison:
    """Compare the first replayed step with the recorded one.

    Secrets in the failure of the replay are redacted, as they are in records.
    """
    replay = replace(replay, failure=redact(replay.failure))
    replayed = next((step for step in replay.steps if step.step == request.first), None)
    if replay.is_left:
        return ReplayComparison(request, recorded, replay, replayed, (), ())
    pairs: dict[str, tuple[str, str]] = {}
    differences: list[str] = []
    stops = _find_stops(request, recorded, replay, replayed) if recorded.failure else None
    if stops is not None:
        pairs["whether it stopped"] = stops
    elif replayed is None:
        differences.append(f"the replay failed: {replay.failure}")
    elif recorded.step is not None:
        pairs = _pairs(request, recorded, recorded.step, replayed)
        if request.microbatch is None:
            differences += _losses(recorded.step, replayed)
    for name, (before, now) in pairs.items():
        if before != now:
            differences.append(f"{name}: recorded {before}, replayed {now}")
    compared = tuple(pairs)
    if replayed is not None and recorded.step is not None and recorded.step.losses:
        compared += ("losses of the micro-batches",) if request.microbatch is None else ()
    return ReplayComparison(request, recorded, replay, replayed, tuple(differences), compared)


def _pairs(
    request: ReplayRequest, recorded: Recorded, step: RecordedStep, replayed: ReplayedStep
) -> dict[str, tuple[str, str]]:
    """Return pairs of recorded and replayed values, as text, by name."""
    pairs = {}
    if step.batch is not None and replayed.batch is not None:
        pairs["samples of the batch"] = step.batch, replayed.batch
    microbatch = request.microbatch
    if microbatch is None:
        if step.loss is not None:
            pairs["loss"] = _exact(step.loss), _exact(replayed.loss)
        if step.norm is not None:
            pairs["gradient norm"] = _exact(step.norm), _exact(replayed.norm)
        if recorded.digest is not None:
            pairs["digest of the weights"] = recorded.digest, replayed.digest
    elif microbatch < len(step.losses):
        name = f"loss of micro-batch {microbatch}"
        pairs[name] = _exact(step.losses[microbatch]), _exact(_loss_of(replayed, microbatch))
    return pairs


def _losses(step: RecordedStep, replayed: ReplayedStep) -> list[str]:
    """Return a list with a phrase about the micro-batches with another loss, or an empty list."""
    if not step.losses:
        return []
    if len(step.losses) != len(replayed.losses):
        counts = len(step.losses), len(replayed.losses)
        return [f"micro-batches: recorded {counts[0]}, replayed {counts[1]}"]
    both = zip(step.losses, replayed.losses, strict=True)
    other = [str(leaf) for leaf, (a, b) in enumerate(both) if _exact(a) != _exact(b)]
    if not other:
        return []
    more = f" and {len(other) - MOST_NAMED} more" if len(other) > MOST_NAMED else ""
    return [f"losses of micro-batches {', '.join(other[:MOST_NAMED])}{more}"]


def _find_stops(
    request: ReplayRequest, recorded: Recorded, replay: Replay, replayed: ReplayedStep | None
) -> tuple[str, str] | None:
    """Return two phrases: how the run and how the replay stopped in the step.

    None if the record does not say what the replay should have done. This is so for a replay of
    one micro-batch when the run stopped in another one, or in an unknown one.
    """
    before = _describe_stop(request.first, recorded.microbatch, recorded.failure)
    is_other = request.is_alone and request.microbatch != recorded.microbatch
    if replayed is not None:
        if is_other:
            return None
        if request.is_alone:
            loss = _loss_of(replayed, request.microbatch or 0)
            now = f"the loss is {loss}"
            return before, _describe_stop(request.first, request.microbatch, now)
        return before, "it did not stop"
    if is_other and recorded.microbatch is not None:
        return None
    if (stop := STOPPED_AT.match(replay.failure)) is not None:
        microbatch = None if stop["microbatch"] is None else int(stop["microbatch"])
        return before, _describe_stop(int(stop["step"]), microbatch, stop["what"])
    if replay.finished != request.first:
        return before, f"before step {request.first}, {replay.failure}"
    return before, before if recorded.failure in replay.failure else replay.failure


def _describe_stop(step: int, microbatch: int | None, what: str) -> str:
    where = f"step {step}" if microbatch is None else f"step {step}, micro-batch {microbatch}"
    return f"{where}: {what}"


def _results(
    step: ReplayedStep | RecordedStep | None, microbatch: int | None
) -> tuple[float | None, float | None]:
    """Return the loss and the norm of a step, or the loss of one of its micro-batches."""
    if step is None:
        return None, None
    if microbatch is None:
        return step.loss, step.norm
    return _loss_of(step, microbatch), None


def _loss_of(step: ReplayedStep | RecordedStep, microbatch: int) -> float | None:
    return step.losses[microbatch] if microbatch < len(step.losses) else None


def _number(name: str, value: float | None) -> dict[str, Any]:
    """Return a number as a float, None if it is not finite, and exactly in hexadecimal."""
    is_plain = value is not None and math.isfinite(value)
    return {name: value if is_plain else None, f"{name}_hex": _exact(value)}


def _exact(value: float | None) -> Any:
    return None if value is None else value.hex()
