"""Bisect: the search for the first difference between two runs, by replays of both.

    records      first step that differs, last digests that agree      no replay
    results      digests, if the records leave several steps           replay of these steps
    modules      step, micro-batch, module or parameter                replay of one or two steps
    operators    phase, operator, line                                 replay of one step
    tensors      first element                                         replay of one step

Both runs are replayed on one process, each with its own sources and variables. A replay must
compute what the record says. A replay that does not is repeated, to learn whether the program is
deterministic, and the report says how far the result can be trusted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lockstep.audit.operator_difference import first_operator_difference
from lockstep.kernel.errors import LockstepError
from lockstep.model.fingerprint import StepFingerprint
from lockstep.tools.replay.divergence import (
    Divergence,
    add_operator,
    compare_microbatches,
    find_in_modules,
    find_in_records,
    limit_to_compared,
    locate_tensor,
)
from lockstep.tools.replay.element_difference import first_element_difference
from lockstep.tools.replay.record_difference import (
    RecordDifference,
    SearchWindow,
    compare_records,
    first_record_difference,
    step_differences,
)
from lockstep.tools.replay.recorded_program import (
    Base,
    Program,
    find_base,
    find_obstacles,
    read_program,
)
from lockstep.tools.replay.recorded_run import RecordedRun, require_comparable
from lockstep.tools.replay.replay_runner import run_program
from lockstep.tools.replay.result import Level, Replay, ReplayRequest

__all__ = ["Bisection", "Compared", "Reproduction", "bisect_runs", "group_by_rank"]

Report = Callable[[str, int, int], None]
"""Called with a description of the current replay, the steps done so far and their total."""

Warn = Callable[[str], None]
"""Called with a sentence about what may keep a replay from computing the recorded bits."""

Replays = tuple[Replay, Replay]


@dataclass(frozen=True)
class Compared:
    """The steps and digests that two records have in common.

    Attributes:
        steps: The number of steps that both have.
        digests: The numbers of finished steps for which both have a digest.
        only_a: The number of steps that only the first record has.
        only_b: The number of steps that only the second record has.
    """

    steps: int
    digests: tuple[int, ...]
    only_a: int
    only_b: int


@dataclass(frozen=True)
class Reproduction:
    """Whether the replays of a run computed what its record says.

    Attributes:
        is_exact: Whether they did; None if the run was not replayed.
        difference: The first difference between replay and record; None if there is none.
        is_repeatable: Whether two replays agree; None if it was not tried.
    """

    is_exact: bool | None = None
    difference: RecordDifference | None = None
    is_repeatable: bool | None = None


@dataclass(frozen=True)
class Bisection:
    """The result of the comparison of two runs.

    Attributes:
        a: The first run.
        b: The second run.
        compared: What the records have in common.
        recorded: The first step at which the records differ; None if no step does.
        divergence: The first difference; None if there is none.
        is_replayed: Whether the divergence comes from replays, not from the records alone.
        reproductions: Whether each run's replays computed what its record says.
        remarks: Sentences about limits of the result.
        model: The name of the model itself among the modules; "" if it is not known.
        seconds: The duration of the bisection, in seconds.
    """

    a: RecordedRun
    b: RecordedRun
    compared: Compared
    recorded: RecordDifference | None = None
    divergence: Divergence | None = None
    is_replayed: bool = False
    reproductions: tuple[Reproduction, Reproduction] = (Reproduction(), Reproduction())
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
    report: Report = lambda doing, done, total: None,
    warn: Warn = lambda sentence: None,
    timeout: float | None = None,
) -> Bisection:
    """Find the first difference between two runs.

    Args:
        a: The first run.
        b: The second run.
        report: Called while steps are replayed.
        warn: Called before the first replay of a run.
        timeout: Seconds after which each replay is ended; None for no limit.

    Raises:
        UsageError: The runs differ by construction.
    """
    begun = time.monotonic()
    recorded = first_record_difference(a.steps, b.steps, (a.stop, b.stop))
    require_comparable(a, b, recorded)
    window = compare_records(a.run.digests, b.run.digests, recorded)
    result = Bisection(a, b, _compare(a, b), recorded)
    if None not in (a.microbatches, b.microbatches) and a.microbatches != b.microbatches:
        unequal = compare_microbatches(a.microbatches, b.microbatches, recorded)
        result = replace(result, divergence=unequal)
    elif window is not None:
        search = Search(a, b, report, warn, timeout)
        divergence = search.find(window)
        first, second = (side.reproduction for side in search.sides)
        result = replace(
            result,
            divergence=divergence or find_in_records(recorded, window),
            is_replayed=search.is_replayed,
            reproductions=(first, second),
            remarks=tuple(search.remarks),
            model=search.model,
        )
    return replace(result, seconds=time.monotonic() - begun)


def _compare(a: RecordedRun, b: RecordedRun) -> Compared:
    """Return what two records have in common."""
    ours, theirs = ({step.step for step in run.steps} for run in (a, b))
    digests = tuple(sorted(a.run.digests.keys() & b.run.digests.keys()))
    return Compared(len(ours & theirs), digests, len(ours - theirs), len(theirs - ours))


class ReplayFailedError(Exception):
    """A run could not be replayed; the message says which one and why."""


class Side:
    """One of the two runs, and what its replays have shown."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self.recorded = {step.step: step for step in run.steps}
        self.reproduction = Reproduction()

    def differs(self) -> bool:
        """Return whether a replay has computed something else than what was recorded."""
        return self.reproduction.difference is not None

    def note(self, replay: Replay, level: Level) -> None:
        """Note whether a replay computed what was recorded; recorded operators may change bits."""
        difference = self.reproduction.difference
        if difference is None and level != "operators":
            difference = self._differ_from_record(replay)
        self.reproduction = replace(
            self.reproduction, is_exact=difference is None, difference=difference
        )

    def _differ_from_record(self, replay: Replay) -> RecordDifference | None:
        """Return the first difference between a replay and the record; None if it has none."""
        digests = self.run.run.digests
        for step in replay.steps:
            recorded = self.recorded.get(step.step)
            if recorded is not None:
                difference = next(step_differences(recorded, step), None)
                if difference is not None:
                    return difference
            digest = digests.get(step.step + 1, step.digest)
            if digest != step.digest:
                return RecordDifference(step.step, "digest", None, digest, step.digest)
        return None


class Search:
    """The replays of one bisection and their results; the arguments are those of `bisect_runs`."""

    def __init__(
        self, a: RecordedRun, b: RecordedRun, report: Report, warn: Warn, timeout: float | None
    ) -> None:
        self.sides = Side(a), Side(b)
        self.remarks: list[str] = []
        self.model = ""
        self.is_replayed = False
        self._report, self._warn, self._timeout = report, warn, timeout

    def find(self, window: SearchWindow) -> Divergence | None:
        """Return the first difference; None if only the records themselves show one."""
        try:
            divergence = self._find_in_modules(window)
            for side in self.sides:
                if side.differs():
                    self._repeat(side, divergence.step if divergence else window.last)
        except ReplayFailedError as failure:
            self._remark(str(failure))
            return None
        if divergence is None:  # the replays agree
            return None
        self.is_replayed = True
        if divergence.what in ("missing", "steps"):
            return divergence
        try:
            return self._find_in_operators(divergence)
        except ReplayFailedError as failure:
            self._remark(str(failure))
            return divergence

    def _remark(self, sentence: str) -> None:
        if sentence not in self.remarks:
            self.remarks.append(sentence)

    # --- modules ------------------------------------------------------------------------------

    def _find_in_modules(self, window: SearchWindow) -> Divergence | None:
        """Return the first difference with its step, micro-batch and module or parameter."""
        first, last = window.first, window.last
        if not window.is_narrow:
            first = last = self._find_step(first, last)
        divergence = self._compare_modules(first, last)
        if divergence is None or divergence.what != "between" or divergence.step > first:
            return divergence
        # The states before the first compared step already differ, so search earlier steps.
        a, b = (side.run.run.digests for side in self.sides)
        earlier = [count for count in a.keys() & b.keys() if a[count] == b[count] and count < first]
        step = self._find_step(max(earlier, default=0), first - 1)
        earlier_divergence = self._compare_modules(step, min(step + 1, last))
        return limit_to_compared(earlier_divergence or divergence, step)

    def _find_step(self, first: int, last: int) -> int:
        """Return the first step in a range after which the replays' states differ, or the last.

        The state of the optimizer may differ steps before the weights do, because a small
        difference is rounded away there: then the step is before the range.
        """
        if first >= last:
            return last
        before = max(0, first - 1)
        a, b = self._replay_both("comparing the states of the steps", before, last, "result")
        for ours, theirs in zip(a.steps, b.steps, strict=True):
            if (ours.digest, ours.optimizer_digest) != (theirs.digest, theirs.optimizer_digest):
                return ours.step if ours.step >= first else self._find_step(0, ours.step)
        return last

    def _compare_modules(self, first: int, last: int) -> Divergence | None:
        replays = self._replay_both("comparing modules", first, last, "modules")
        a, b = (group_by_rank([step.fingerprints for step in replay.steps]) for replay in replays)
        calls = next(iter(a[0][-1].calls.values()), [])
        self.model = next((module for kind, module, _ in calls if kind == "enter"), "")
        stopped = {side.run.stop.step for side in self.sides if side.run.stop is not None}
        return find_in_modules(a, b, stopped)

    # --- operators ----------------------------------------------------------------------------

    def _find_in_operators(self, divergence: Divergence) -> Divergence:
        """Add the operator and the first element to a divergence, as far as they are known."""
        step = divergence.step
        replays = self._replay_both("comparing operators", step, step, "operators")
        a, b = (replay.steps[0].operators for replay in replays)
        if not self._is_unchanged_by_tracing(replays):
            return divergence
        difference = first_operator_difference(a, b)
        if difference is not None:
            divergence = add_operator(divergence, difference, a, b)
        operand = locate_tensor(divergence, difference, a, b)
        if operand is None:
            return divergence
        replays = self._replay_both(
            "comparing elements", step, step, "operators", (operand.a, operand.b)
        )
        kept = [replay.steps[0].kept for replay in replays]
        tensors = [
            (call.inputs if operand.is_input else call.outputs)[operand.position]
            for call in kept
            if call is not None
        ]
        if len(tensors) < 2:
            return divergence
        return replace(divergence, element=first_element_difference(*tensors))

    def _is_unchanged_by_tracing(self, replays: Replays) -> bool:
        """Return whether tracing operators leaves the step's bits unchanged; else add a remark."""
        for side, replay in zip(self.sides, replays, strict=True):
            step = replay.steps[0]
            recorded = side.recorded.get(step.step)
            if side.differs() or recorded is None:
                continue
            changed = next(step_differences(recorded, step), None)
            if changed is not None:
                self.remarks.append(
                    f"Recording the operators of {side.run.name} changed its bits (the "
                    f"{changed.what} of step {step.step} is {changed.b} instead of {changed.a}), "
                    "so no operator is named"
                )
                return False
        return True

    # --- replays ------------------------------------------------------------------------------

    def _replay_both(
        self,
        doing: str,
        first: int,
        last: int,
        level: Level,
        kept: tuple[int | None, int | None] = (None, None),
    ) -> Replays:
        """Return replays of the same steps of both runs.

        Raises:
            ReplayFailedError: A run cannot be replayed.
        """
        sides = zip(self.sides, kept, strict=True)
        a, b = (self._replay_one(side, doing, first, last, level, call) for side, call in sides)
        return a, b

    def _replay_one(
        self, side: Side, doing: str, first: int, last: int, level: Level, kept: int | None = None
    ) -> Replay:
        run = side.run
        request = ReplayRequest(
            run.folder, first, last, level=level, kept=kept, timeout=self._timeout
        )
        try:
            program, base = self._prepare(run, first)
            replay = run_program(
                program,
                base,
                request,
                lambda done, total: self._report(f"{doing}, {run.name}", done, total),
            )
        except LockstepError as error:
            raise ReplayFailedError(f"{run.name} cannot be replayed: {error}") from None
        is_expected = run.stop is not None and run.stop.is_value and run.stop.step == last
        if replay.failure and not (is_expected and len(replay.steps) == last + 1 - first):
            raise ReplayFailedError(f"The replay of {run.name} failed: {replay.failure}")
        side.note(replay, level)
        return replay

    def _prepare(self, run: RecordedRun, step: int) -> tuple[Program, Base]:
        """Return the program of a run, and the checkpoint before a step.

        Raises:
            UsageError: The run cannot be replayed.
        """
        program, base = read_program(run.run, step), find_base(run.run, step)
        for obstacle in find_obstacles(run.run, step, program, base):
            remark = f"{run.name}: {obstacle}"
            if remark not in self.remarks:
                self._warn(remark)
                self.remarks.append(remark)
        return program, base

    def _repeat(self, side: Side, step: int) -> None:
        """Replay a step of a run twice, and note whether both replays agree."""
        replays = [self._replay_one(side, "repeating", step, step, "modules") for _ in range(2)]
        first, second = (group_by_rank([replay.steps[0].fingerprints]) for replay in replays)
        is_repeatable = find_in_modules(first, second) is None
        side.reproduction = replace(side.reproduction, is_repeatable=is_repeatable)


def group_by_rank(steps: Sequence[Sequence[StepFingerprint]]) -> list[list[StepFingerprint]]:
    """Return the fingerprints of each rank, from those of each step.

    Steps may come from different layouts: a rank that a step does not have recorded nothing in it.
    """
    count = max(map(len, steps), default=0)
    return [
        [
            ranks[number]
            if number < len(ranks)
            else StepFingerprint(ranks[0].trainer, ranks[0].step)
            for ranks in steps
        ]
        for number in range(count)
    ]
