"""The audit of a record: recorded steps computed again on this machine, and compared bit for bit.

replay of the steps     as recorded                               same
then of one step        not as recorded, with equal bits twice    different
                        not as recorded, with other bits again    unstable
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from lockstep.record.columns import as_dict
from lockstep.record.run_environment import describe_environment
from lockstep.tools.replay.record_difference import RecordDifference, step_differences
from lockstep.tools.replay.recorded_program import find_base, find_obstacles, read_program
from lockstep.tools.replay.recorded_run import RecordedRun
from lockstep.tools.replay.replay_runner import run_program
from lockstep.tools.replay.result import ReplayedStep, ReplayRequest

__all__ = ["MACHINE", "RecordAudit", "audit_record"]

MACHINE = ("hostname", "processor", "instructions", "gpus", "torch", "lockstep")
"""The fields of an environment that tell a machine and its arithmetic."""


@dataclass(frozen=True)
class RecordAudit:
    """The result of an audit.

    Attributes:
        run: The run.
        first: The first step that was to be computed.
        last: The last one.
        steps: The number of computed steps.
        digests: The numbers of finished steps after which digests of the weights were compared.
        difference: The first difference; None if there is none.
        is_repeatable: Whether this machine computed the step that differs twice with the same
            bits; None if it was not computed twice.
        failure: Why the steps could not be computed; "" if they were.
        seconds: The duration of the audit, in seconds.
    """

    run: RecordedRun
    first: int
    last: int
    steps: int = 0
    digests: tuple[int, ...] = ()
    difference: RecordDifference | None = None
    is_repeatable: bool | None = None
    failure: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> Literal["same", "different", "unstable", "failed"]:
        """The result in a word."""
        if self.difference is None:
            return "failed" if self.failure else "same"
        return "unstable" if self.is_repeatable is False else "different"

    @cached_property
    def machines(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The machine that recorded the last compared step, and this one."""
        step = self.last if self.difference is None else self.difference.step
        recorded = as_dict(self.run.run.latest("environment", step))
        here = describe_environment()
        if recorded.get("portable"):  # the ranks chose the kernels, and not this process
            here["instructions"] = recorded.get("instructions")
        return {name: recorded.get(name) for name in MACHINE}, {
            name: here[name] for name in MACHINE
        }

    def plain(self) -> dict[str, Any]:
        """Return the object for `--json`."""
        difference = self.difference
        return {
            "run": str(self.run.folder),
            "first": self.first,
            "last": self.last,
            "equal": self.verdict == "same",
            "verdict": self.verdict,
            "steps": self.steps,
            "digests": list(self.digests),
            **{key: getattr(difference, key, None) for key in ("step", "microbatch", "what")},
            "recorded": difference and difference.a,
            "computed": difference and difference.b,
            "findings": self.run.run.findings,
            "recorded_on": self.machines[0],
            "here": self.machines[1],
            "failure": self.failure or None,
            "seconds": round(self.seconds, 3),
        }


def audit_record(
    run: RecordedRun,
    first: int,
    last: int,
    warn: Callable[[str], None],
) -> RecordAudit:
    """Compute recorded steps again on one process, and compare them with the record.

    Args:
        run: The run.
        first: The first step, from 0.
        last: The last step.
        warn: Called with sentences about what may keep the replay from computing the same bits.

    Raises:
        UsageError: The run cannot be replayed.
    """
    begun = time.monotonic()
    result = RecordAudit(run, first, last)
    for begin, end in _split_at_resumptions(run, first, last):
        program = read_program(run.run, begin)
        base = find_base(run.run, begin)
        for obstacle in find_obstacles(run.run, begin, program, base):
            warn(obstacle)
        request = ReplayRequest(run.folder, begin, end)
        replay = run_program(program, base, request)
        finished = {step.step + 1: step for step in replay.steps}
        result = replace(
            result,
            steps=result.steps + len(finished),
            digests=(*result.digests, *sorted(finished.keys() & run.run.digests.keys())),
            difference=run.find_deviation(replay),
            failure=replay.failure,
        )
        if (difference := result.difference) is not None:
            request = replace(request, first=difference.step, last=difference.step)
            again = run_program(program, base, request)
            is_repeatable = not again.failure and _have_equal_bits(
                finished[difference.step + 1], again.steps[0]
            )
            result = replace(result, is_repeatable=is_repeatable)
        if difference is not None or result.failure:
            break
    return replace(result, seconds=time.monotonic() - begun)


def _split_at_resumptions(run: RecordedRun, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of steps that one process of the run computed: first and last step."""
    steps = [line.get("step") for line in run.run.resumes]
    inner = {step for step in steps if isinstance(step, int) and first < step <= last}
    begins = [first, *sorted(inner), last + 1]
    for begin, end in pairwise(begins):
        yield begin, end - 1


def _have_equal_bits(a: ReplayedStep, b: ReplayedStep) -> bool:
    """Return whether two computations of a step, with the states after it, are equal."""
    states = [(step.digest, step.optimizer_digest) for step in (a, b)]
    return next(step_differences(a, b), None) is None and states[0] == states[1]
