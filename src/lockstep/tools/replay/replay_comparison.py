"""The comparison of a replayed step with the record, bit for bit, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.kernel.errors import StoppedError
from lockstep.record.fingerprints import RecordedStep
from lockstep.record.reader import Run
from lockstep.tools.replay.record_difference import replay_differences
from lockstep.tools.replay.result import Replay, ReplayedStep, ReplayRequest

__all__ = ["Recorded", "ReplayComparison", "compare", "find_recorded"]

MOST_NAMED = 8  # the largest number of differences in a sentence


@dataclass(frozen=True)
class Recorded:
    """The part of a record that is about one step.

    Attributes:
        step: The step; None if the run stopped in it.
        digest: The digest of the weights after it; None if none was recorded.
        failure: The reason why the run stopped in this step: "step 7, micro-batch 2: the loss is
            nan", "step 7: KeyError: 'lr'", and without the step if it was between two steps; ""
            if it did not, or if the reason is not known.
        microbatch: The micro-batch where it stopped; None if it is not known.
    """

    step: RecordedStep | None
    digest: str | None = None
    failure: str = ""
    microbatch: int | None = None


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
    differences: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether the replay computed everything that was recorded."""
        return bool(self.compared) and not self.differences

    def plain(self) -> dict[str, Any]:
        """Return the object for `--json`."""
        ranks = self.request.ranks
        microbatch = self.request.microbatch
        loss, norm = _results(self.replayed, microbatch)
        recorded_loss, recorded_norm = _results(self.recorded.step, microbatch)
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
            "layout": {"world_size": ranks, "replicas": ranks, "stages": 1},
            "from_step": self.replay.base,
            "seconds": round(self.replay.seconds, 3),
            "failure": self.replay.failure or None,
            "stop": self.replay.stop,
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
    end = run.end or {}
    if end.get("step") == number:
        return Recorded(None, failure=_describe(end), microbatch=end.get("microbatch"))
    message = str(end.get("message") or "")
    is_next = run.state == "failed" and number == max(steps, default=-1) + 1
    return Recorded(None, failure=message.splitlines()[0] if message and is_next else "")


def _describe(end: Mapping[str, Any]) -> str:
    """Return why a run stopped in a step, which depends neither on the layout nor on words."""
    step = f"step {end['step']}"
    if "value" in end:
        return f"{step}, micro-batch {end['microbatch']}: the loss is {end['value']}"
    code = end.get("code")
    if code == StoppedError.__name__:
        return step  # for an error of another rank, which the record does not have
    return f"{step}: {code}: {end.get('reason', '')}".removesuffix(": ")


def compare(request: ReplayRequest, recorded: Recorded, replay: Replay) -> ReplayComparison:
    """Compare the first replayed step with the recorded one."""
    replayed = next((step for step in replay.steps if step.step == request.first), None)
    result = ReplayComparison(request, recorded, replay, replayed)
    if replay.is_left:
        return result
    if recorded.failure:
        return _compare_stop(result)
    if replayed is None:
        return replace(result, differences=(f"the replay failed: {replay.failure}",))
    if recorded.step is None:
        return result
    step = recorded.step
    digest = recorded.digest
    microbatch = request.microbatch
    losses = "losses of the micro-batches"
    if microbatch is not None:
        step = replace(step, loss=None, norm=None, losses=_keep_one(step.losses, microbatch))
        # On several ranks, the replay computes the others, too.
        replayed = replace(replayed, losses=_keep_one(replayed.losses, microbatch))
        digest = None
        losses = f"loss of micro-batch {microbatch}"
    values = {
        "samples of the batch": None if replayed.batch is None else step.batch,
        "loss": step.loss,
        "gradient norm": step.norm,
        "digest of the weights": digest,
        losses: step.losses or None,
    }
    differences = [
        f"{found.what}{'' if found.microbatch is None else f' {found.microbatch}'}: recorded "
        f"{found.a}, replayed {found.b}"
        for found in replay_differences(step, digest, replayed)
    ]
    if len(differences) > MOST_NAMED:
        differences[MOST_NAMED:] = [f"and {len(differences) - MOST_NAMED} more"]
    compared = tuple(name for name, value in values.items() if value is not None)
    return replace(result, differences=tuple(differences), compared=compared)


def _keep_one(losses: Sequence[float | None], microbatch: int) -> tuple[float | None, ...]:
    """Return the losses of the micro-batches, with None for all but one."""
    return tuple(loss if m == microbatch else None for m, loss in enumerate(losses))


def _compare_stop(result: ReplayComparison) -> ReplayComparison:
    """Compare how the run and the replay stopped in a step.

    Nothing is recorded of the other micro-batches of the step.
    """
    request = result.request
    recorded = result.recorded
    stop = result.replay.stop
    now = result.replay.failure if stop is None else _describe(stop)
    if result.replayed is not None and request.is_alone:
        if request.microbatch != recorded.microbatch:
            return result
        loss, _ = _results(result.replayed, request.microbatch)
        now = f"step {request.first}, micro-batch {request.microbatch}: the loss is {loss}"
    elif result.replayed is not None:
        now = "it did not stop"
    compared = ("whether it stopped",)
    if recorded.failure in now:
        return replace(result, compared=compared)
    difference = f"whether it stopped: recorded {recorded.failure}, replayed {now}"
    return replace(result, differences=(difference,), compared=compared)


def _results(
    step: ReplayedStep | RecordedStep | None, microbatch: int | None
) -> tuple[float | None, float | None]:
    """Return the loss and the norm of a step, or the loss of one of its micro-batches."""
    if step is None:
        return None, None
    if microbatch is None:
        return step.loss, step.norm
    return step.losses[microbatch] if microbatch < len(step.losses) else None, None


def _number(name: str, value: float | None) -> dict[str, Any]:
    """Return a number as a float, None if it is not finite, and exactly in hexadecimal."""
    is_plain = value is not None and math.isfinite(value)
    return {
        name: value if is_plain else None,
        f"{name}_hex": None if value is None else value.hex(),
    }
