"""Bisect: the search for the first difference between two runs, by replays of both.

    records      first step that differs, last digests that agree      no replay
    results      first step with other states, if there are several    replay of these steps
    modules      micro-batch, module or parameter                      replay of one step
    operators    phase, operator, line                                 replay of one step
    tensors      first element                                         replay of one step

Both runs are replayed on one process, each with its own sources and variables. The report says
whether a replay has computed what the record says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from lockstep.audit.operator_difference import first_operator_difference
from lockstep.kernel.errors import LockstepError, UsageError
from lockstep.tools.replay.divergence import (
    Divergence,
    add_operator,
    compare_microbatches,
    find_in_modules,
    find_in_records,
    locate_tensor,
)
from lockstep.tools.replay.element_difference import first_element_difference
from lockstep.tools.replay.record_difference import (
    RecordDifference,
    find_window,
    first_record_difference,
    step_differences,
)
from lockstep.tools.replay.recorded_program import find_base, find_obstacles, read_program
from lockstep.tools.replay.recorded_run import RecordedRun
from lockstep.tools.replay.replay_runner import run_program
from lockstep.tools.replay.result import Level, Replay, ReplayRequest

__all__ = ["Bisection", "bisect_runs"]

Log = Callable[[str], None]
"""Called with a sentence: what is replayed, and what may keep a replay from computing the recorded
bits."""

Replays = tuple[Replay, Replay]


@dataclass(frozen=True)
class Bisection:
    """The result of the comparison of two runs.

    Attributes:
        a: The first run.
        b: The second run.
        recorded: The first step at which the records differ; None if no step does.
        divergence: The first difference; None if there is none.
        is_replayed: Whether the divergence comes from replays, not from the records alone.
        is_exact: Whether each run's replays computed what its record says; None if the run was not
            replayed.
        remarks: Sentences about limits of the result.
        model: The name of the model itself among the modules; "" if it is not known.
        seconds: The duration of the bisection, in seconds.
    """

    a: RecordedRun
    b: RecordedRun
    recorded: RecordDifference | None = None
    divergence: Divergence | None = None
    is_replayed: bool = False
    is_exact: tuple[bool | None, bool | None] = (None, None)
    remarks: tuple[str, ...] = ()
    model: str = ""
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether everything that both records have is equal."""
        return self.divergence is None


def bisect_runs(
    a: RecordedRun,
    b: RecordedRun,
    log: Log = lambda sentence: None,
) -> Bisection:
    """Find the first difference between two runs.

    Args:
        a: The first run.
        b: The second run.
        log: Called before each replay.

    Raises:
        UsageError: The runs have no step in common.
    """
    begun = time.monotonic()
    recorded = first_record_difference(a.steps, b.steps)
    if not {step.step for step in a.steps} & {step.step for step in b.steps}:
        raise UsageError(f"{a.name} and {b.name} have no step in common")
    window = find_window(a.run.digests, b.run.digests, recorded)
    result = Bisection(a, b, recorded)
    if None not in (a.microbatches, b.microbatches) and a.microbatches != b.microbatches:
        unequal = compare_microbatches(a.microbatches, b.microbatches, recorded)
        result = replace(result, divergence=unequal)
    elif window is not None:
        search = Search(a, b, log)
        divergence = search.find(*window)
        first, second = search.is_exact
        result = replace(
            result,
            divergence=divergence or find_in_records(recorded, *window),
            is_replayed=divergence is not None,
            is_exact=(first, second),
            remarks=tuple(search.remarks),
            model=search.model,
        )
    return replace(result, seconds=time.monotonic() - begun)


class ReplayFailedError(Exception):
    """A run could not be replayed; the message says which one and why."""


class Search:
    """The replays of one bisection and their results; the arguments are those of `bisect_runs`."""

    def __init__(self, a: RecordedRun, b: RecordedRun, log: Log) -> None:
        self.remarks: list[str] = []
        self.model = ""
        self.is_exact: list[bool | None] = [None, None]
        self._runs = (a, b)
        self._log = log

    def find(self, first: int, last: int) -> Divergence | None:
        """Return the first difference; None if only the records themselves show one.

        Args:
            first: The first step in which it may arise.
            last: The last one.
        """
        try:
            step = self._find_step(first, last)
            divergence = self._find_in_modules(step)
        except ReplayFailedError as failure:
            self._remark(str(failure))
            return None
        if divergence is None or divergence.what in ("missing", "steps"):
            return divergence
        try:
            return self._find_in_operators(divergence)
        except ReplayFailedError as failure:
            self._remark(str(failure))
            return divergence

    def _remark(self, sentence: str) -> None:
        if sentence not in self.remarks:
            self.remarks.append(sentence)

    def _find_step(self, first: int, last: int) -> int:
        """Return the first step in a range after which the replays' states differ, or the last.

        The state of the optimizer may differ steps before the weights do, because a small
        difference is rounded away there: then the step is before the range.
        """
        # A replay runs the sources of its first step, and a resumed run may have others.
        resumed = [line.get("step") for run in self._runs for line in run.run.resumes]
        begins = [step for step in resumed if isinstance(step, int) and step <= last]
        before = max(0, first - 1, *begins)
        if before >= last:
            return last
        a, b = self._replay_both("results", before, last - 1, "result")
        for ours, theirs in zip(a.steps, b.steps, strict=True):
            if (ours.digest, ours.optimizer_digest) != (theirs.digest, theirs.optimizer_digest):
                return ours.step if ours.step >= first else self._find_step(0, ours.step)
        return last

    def _find_in_modules(self, step: int) -> Divergence | None:
        """Return the first difference in a step: its micro-batch and module or parameter."""
        replays = self._replay_both("modules", step, step, "modules")
        (a,), (b,) = (replay.steps[0].fingerprints for replay in replays)
        calls = next(iter(a.calls.values()), [])
        self.model = next((module for kind, module, _ in calls if kind == "enter"), "")
        return find_in_modules(a, b)

    def _find_in_operators(self, divergence: Divergence) -> Divergence:
        """Add the operator and the first element to a divergence, as far as they are known."""
        step = divergence.step
        replays = self._replay_both("operators", step, step, "operators")
        a, b = (replay.steps[0].operators for replay in replays)
        if not self._is_unchanged_by_tracing(replays):
            return divergence
        difference = first_operator_difference(a, b)
        if difference is not None:
            divergence = add_operator(divergence, difference, a, b)
        operand = locate_tensor(divergence, difference, a, b)
        if operand is None:
            return divergence
        kept = operand.a, operand.b
        replays = self._replay_both("elements", step, step, "operators", kept)
        calls = [replay.steps[0].kept for replay in replays]
        tensors = [
            (call.inputs if operand.is_input else call.outputs)[operand.position]
            for call in calls
            if call is not None
        ]
        if len(tensors) < 2:
            return divergence
        return replace(divergence, element=first_element_difference(*tensors))

    def _is_unchanged_by_tracing(self, replays: Replays) -> bool:
        """Return whether tracing operators leaves the step's bits unchanged; else add a remark."""
        for run, is_exact, replay in zip(self._runs, self.is_exact, replays, strict=True):
            step = replay.steps[0]
            recorded = next((one for one in run.steps if one.step == step.step), None)
            if not is_exact or recorded is None:
                continue
            changed = next(step_differences(recorded, step), None)
            if changed is not None:
                self._remark(
                    f"Recording the operators of {run.name} changed its bits (the "
                    f"{changed.what} of step {step.step} is {changed.b} instead of {changed.a}), "
                    "so no operator is named"
                )
                return False
        return True

    def _replay_both(
        self,
        what: str,
        first: int,
        last: int,
        level: Level,
        kept: tuple[int | None, int | None] = (None, None),
    ) -> Replays:
        """Return replays of the same steps of both runs.

        Raises:
            ReplayFailedError: A run cannot be replayed.
        """
        a, b = (self._replay(side, what, first, last, level, kept[side]) for side in range(2))
        return a, b

    def _replay(
        self, side: int, what: str, first: int, last: int, level: Level, kept: int | None
    ) -> Replay:
        run = self._runs[side]
        request = ReplayRequest(run.folder, first, last, level=level, kept=kept)
        try:
            program = read_program(run.run, first)
            base = find_base(run.run, first)
            for obstacle in find_obstacles(run.run, first, program, base):
                remark = f"{run.name}: {obstacle}"
                if remark not in self.remarks:
                    self._log(remark)
                    self.remarks.append(remark)
            self._log(f"comparing {what} of step {last}: replaying {run.name} from {base}")
            replay = run_program(program, base, request)
        except LockstepError as error:
            raise ReplayFailedError(f"{run.name} cannot be replayed: {error}") from None
        if replay.failure:
            raise ReplayFailedError(f"The replay of {run.name} failed: {replay.failure}")
        if level != "operators" and self.is_exact[side] is not False:  # tracing may change bits
            deviation = run.find_deviation(replay)
            self.is_exact[side] = deviation is None
            if deviation is not None:
                number = deviation.microbatch
                self._remark(
                    f"The replay of {run.name} does not compute what was recorded: the "
                    f"{deviation.what}{'' if number is None else f' {number}'} of step "
                    f"{deviation.step} was {deviation.a} and is {deviation.b} now; see lockstep "
                    f"audit {run.folder} --steps {deviation.step}"
                )
        return replay
