"""Bisect: the search for the first difference between two runs, by replays of both.

    records      first step that differs, last digests that agree      no replay
    results      digests, if the records leave several steps           replay of these steps
    modules      step, micro-batch, module or parameter                replay of one or two steps
    operators    phase, operator, line                                 replay of one step
    tensors      first element                                         replay of one step

Both runs are replayed on one process, each with its own sources and variables. A replay must
compute what the record says. A replay that does not is repeated, to learn whether the program is
deterministic, and the report says how far the finding can be trusted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.kernel.errors import LockstepError
from lockstep.model.fingerprint import StepFingerprint
from lockstep.replay.element_difference import ElementDifference, first_element_difference
from lockstep.replay.finding import (
    Finding,
    TensorPlace,
    add_operator,
    compare_microbatches,
    find_in_modules,
    find_in_records,
    limit_place,
    locate_tensor,
)
from lockstep.replay.operator_difference import first_operator_difference
from lockstep.replay.program import Base, Program, find_base, find_obstacles, read_program
from lockstep.replay.record_difference import (
    RecordDifference,
    SearchWindow,
    compare_records,
    first_record_difference,
    step_differences,
)
from lockstep.replay.recorded_run import RecordedRun, require_comparable
from lockstep.replay.result import Level, Replay, ReplayedStep, ReplayRequest
from lockstep.replay.runner import run_program

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
        finding: The first difference; None if there is none.
        is_replayed: Whether the finding comes from replays, not from the records alone.
        reproductions: Whether each run's replays computed what its record says.
        remarks: Sentences about limits of the finding.
        modules: The modules that the step called, in forward order.
        seconds: The duration of the bisection, in seconds.
    """

    a: RecordedRun
    b: RecordedRun
    compared: Compared
    recorded: RecordDifference | None = None
    finding: Finding | None = None
    is_replayed: bool = False
    reproductions: tuple[Reproduction, Reproduction] = (Reproduction(), Reproduction())
    remarks: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether everything that both records have is equal."""
        return self.finding is None


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
    found = Bisection(a, b, _compare(a, b), recorded)
    if None not in (a.microbatches, b.microbatches) and a.microbatches != b.microbatches:
        unequal = compare_microbatches(a.microbatches, b.microbatches, recorded)
        return replace(found, finding=unequal, seconds=time.monotonic() - begun)
    if window is not None:
        search = Search(a, b, report, warn, timeout)
        finding = search.find(window)
        found = replace(
            found,
            finding=finding or find_in_records(recorded, window),
            is_replayed=search.is_replayed,
            reproductions=search.reproductions(),
            remarks=tuple(search.remarks),
            modules=search.modules,
        )
    return replace(found, seconds=time.monotonic() - begun)


def _compare(a: RecordedRun, b: RecordedRun) -> Compared:
    """Return what two records have in common."""
    ours, theirs = ({each.step for each in run.steps} for run in (a, b))
    digests = tuple(sorted(a.run.digests.keys() & b.run.digests.keys()))
    return Compared(len(ours & theirs), digests, len(ours - theirs), len(theirs - ours))


class ReplayFailedError(Exception):
    """A run could not be replayed; the message says which one and why."""


class Search:
    """The replays of one bisection and their findings; the arguments are those of `bisect_runs`."""

    def __init__(
        self, a: RecordedRun, b: RecordedRun, report: Report, warn: Warn, timeout: float | None
    ) -> None:
        self.remarks: list[str] = []
        self.modules: tuple[str, ...] = ()
        self.is_replayed = False
        self._sides = (a, b)
        self._report, self._warn, self._timeout = report, warn, timeout
        self._recorded = tuple({each.step: each for each in run.steps} for run in (a, b))
        self._differences: list[RecordDifference | None] = [None, None]
        self._is_replayed = [False, False]
        self._is_repeatable: list[bool | None] = [None, None]

    def reproductions(self) -> tuple[Reproduction, Reproduction]:
        """Return whether the replays of each run computed what its record says."""
        first, second = (
            Reproduction(
                self._differences[side] is None if self._is_replayed[side] else None,
                self._differences[side],
                self._is_repeatable[side],
            )
            for side in range(2)
        )
        return first, second

    def find(self, window: SearchWindow) -> Finding | None:
        """Return the first difference; None if only the records themselves show one."""
        exported = [run.name for run in self._sides if run.folder is None]
        for name in exported:
            self._remark(
                f"{name} is an exported file, which cannot be replayed: only what was recorded is "
                "compared"
            )
        if exported:
            return self._find_in_recorded(window)
        try:
            found = self._find_in_modules(window)
            for side in range(2):
                if self._differences[side] is not None:
                    self._repeat(side, found.step if found else window.last)
        except ReplayFailedError as failure:
            self._remark(str(failure))
            return self._find_in_recorded(window)
        if found is None:  # the replays agree
            return self._find_in_recorded(window)
        self.is_replayed = True
        if found.what in ("missing", "steps"):
            return found
        try:
            return self._find_in_operators(found)
        except ReplayFailedError as failure:
            self._remark(str(failure))
            return found

    def _remark(self, sentence: str) -> None:
        if sentence not in self.remarks:
            self.remarks.append(sentence)

    # --- recorded fingerprints ----------------------------------------------------------------

    def _find_in_recorded(self, window: SearchWindow) -> Finding | None:
        """Return the first difference of the recorded fingerprints; replays only fill gaps."""
        a, b = (self._known_fingerprints(side, window) for side in range(2))
        steps = sorted(a.keys() & b.keys())
        while steps and steps[-1] - steps[0] >= len(steps):  # keep the last consecutive steps
            steps.pop(0)
        if not steps:
            return None
        ours, theirs = (group_by_rank([known[step] for step in steps]) for known in (a, b))
        found = find_in_modules(ours, theirs, self._unfinished(steps, a, b))
        return limit_place(found, steps[0])

    def _unfinished(
        self, steps: Sequence[int], *known: Mapping[int, Sequence[StepFingerprint]]
    ) -> set[int]:
        """Return the steps of which one of the runs lacks micro-batches."""
        found = {run.stop.step for run in self._sides if run.stop is not None}
        for side, each in enumerate(known):
            for step in steps:
                recorded = self._recorded[side].get(step)
                losses = {leaf for rank in each[step] for leaf in rank.losses}
                if recorded is not None and len(losses) < sum(
                    loss is not None for loss in recorded.losses
                ):
                    found.add(step)
        return found

    def _known_fingerprints(
        self, side: int, window: SearchWindow
    ) -> dict[int, list[StepFingerprint]]:
        """Return the known fingerprints of each rank of a run, by step of a window.

        Recorded fingerprints come first. Those of a replay fill the gaps, unless the replay is
        known to differ from the record.
        """
        run, steps = self._sides[side], range(window.first, window.last + 1)
        known = {step: run.fingerprints[step] for step in steps if step in run.fingerprints}
        if len(known) == len(steps) or run.folder is None or self._differences[side] is not None:
            return known
        try:
            replay = self._replay_one(side, "comparing modules", steps[0], steps[-1], "modules")
        except ReplayFailedError as failure:
            self._remark(str(failure))
            return known
        if self._differences[side] is not None:
            return known
        return {each.step: each.fingerprints for each in replay.steps} | known

    # --- modules ------------------------------------------------------------------------------

    def _find_in_modules(self, window: SearchWindow) -> Finding | None:
        """Return the first difference with its step, micro-batch and module or parameter."""
        first, last = window.first, window.last
        if not window.is_narrow:
            first = last = self._find_step(first, last)
        found = self._compare_modules(first, last)
        if found is None or found.what != "between" or found.step > first:
            return found
        # The states before the first compared step already differ, so search earlier steps.
        earlier = [taken for taken in self._common_digests() if taken <= first - 1]
        step = self._find_step(max(earlier, default=0), first - 1)
        return limit_place(self._compare_modules(step, min(step + 1, last)) or found, step)

    def _common_digests(self) -> list[int]:
        """Return the numbers of finished steps for which both records have the same digest."""
        a, b = (side.run.digests for side in self._sides)
        return [taken for taken in a.keys() & b.keys() if a[taken] == b[taken]]

    def _find_step(self, first: int, last: int) -> int:
        """Return the first step in a range after which the replays' states differ, or the last.

        The state of the optimizer may differ steps before the weights do, because a small
        difference is rounded away there: then the step is before the range.
        """
        if first >= last:
            return last
        before = max(0, first - 1)
        replays = self._replay_both("comparing the states of the steps", before, last, "result")
        a, b = (each.steps for each in replays)
        for ours, theirs in zip(a, b, strict=True):
            if _state_of(ours) != _state_of(theirs):
                return ours.step if ours.step >= first else self._find_step(0, ours.step)
        return last

    def _compare_modules(self, first: int, last: int) -> Finding | None:
        replays = self._replay_both("comparing modules", first, last, "modules")
        a, b = (group_by_rank([step.fingerprints for step in each.steps]) for each in replays)
        calls = next(iter(a[0][-1].calls.values()), [])
        self.modules = tuple(
            dict.fromkeys(module for kind, module, _ in calls if kind == "enter" and module)
        )
        stopped = {run.stop.step for run in self._sides if run.stop is not None}
        return find_in_modules(a, b, stopped)

    # --- operators ----------------------------------------------------------------------------

    def _find_in_operators(self, found: Finding) -> Finding:
        """Add the operator and the first element to a finding, as far as they are known."""
        step = found.step
        replays = self._replay_both("comparing operators", step, step, "operators")
        a, b = (each.steps[0].operators for each in replays)
        if not self._is_unchanged_by_tracing(replays):
            return found
        difference = first_operator_difference(a, b)
        if difference is not None:
            found = add_operator(found, difference, a, b)
        place = locate_tensor(found, difference, a, b)
        if place is None:
            return found
        return replace(found, element=self._compare_elements(step, place))

    def _is_unchanged_by_tracing(self, replays: Replays) -> bool:
        """Return whether tracing operators leaves the step's bits unchanged; else add a remark."""
        for side, replay in enumerate(replays):
            run, step = self._sides[side], replay.steps[0]
            recorded = self._recorded[side].get(step.step)
            if self._differences[side] is not None or recorded is None:
                continue
            changed = next(step_differences(recorded, step), None)
            if changed is not None:
                self.remarks.append(
                    f"Recording the operators of {run.name} changed its bits (the {changed.what} "
                    f"of step {step.step} is {changed.b} instead of {changed.a}), so no operator "
                    "is named"
                )
                return False
        return True

    def _compare_elements(self, step: int, place: TensorPlace) -> ElementDifference | None:
        """Return the first element in which two tensors differ."""
        calls = (place.a, place.b)
        replays = self._replay_both("comparing elements", step, step, "operators", calls)
        kept = [each.steps[0].kept for each in replays]
        tensors = [
            (each.inputs if place.is_input else each.outputs)[place.position]
            for each in kept
            if each is not None
        ]
        return first_element_difference(*tensors) if len(tensors) == 2 else None

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
        a, b = (self._replay_one(side, doing, first, last, level, kept[side]) for side in range(2))
        return a, b

    def _replay_one(
        self, side: int, doing: str, first: int, last: int, level: Level, kept: int | None = None
    ) -> Replay:
        run = self._sides[side]
        assert run.folder is not None, "an exported file cannot be replayed"
        request = ReplayRequest(
            run.folder, first, last, level=level, kept=kept, timeout=self._timeout
        )
        try:
            program, base = self._prepare(side, first)
            replay = run_program(
                program,
                base,
                request,
                lambda done, total: self._report(
                    f"{doing}, {run.name}", base.steps + done, base.steps + total
                ),
            )
        except LockstepError as error:
            raise ReplayFailedError(f"{run.name} cannot be replayed: {error}") from None
        is_expected = run.stop is not None and run.stop.is_value and run.stop.step == last
        if replay.failure and not (is_expected and len(replay.steps) == last + 1 - first):
            raise ReplayFailedError(f"The replay of {run.name} failed: {replay.failure}")
        self._is_replayed[side] = True
        if level != "operators" and self._differences[side] is None:
            self._differences[side] = self._differ_from_record(side, replay)
        return replay

    def _prepare(self, side: int, step: int) -> tuple[Program, Base]:
        """Return the program of a run, and the checkpoint before a step.

        Raises:
            UsageError: The run cannot be replayed.
        """
        run = self._sides[side]
        program, base = read_program(run.run, step), find_base(run.run, step)
        for obstacle in find_obstacles(run.run, step, program, base):
            remark = f"{run.name}: {obstacle}"
            if remark not in self.remarks:
                self._warn(remark)
            self._remark(remark)
        return program, base

    def _differ_from_record(self, side: int, replay: Replay) -> RecordDifference | None:
        """Return the first difference between a replay and the record; None if it has none."""
        digests = self._sides[side].run.digests
        for step in replay.steps:
            recorded = self._recorded[side].get(step.step)
            if recorded is not None:
                found = next(step_differences(recorded, step), None)
                if found is not None:
                    return found
            digest = digests.get(step.step + 1, step.digest)
            if digest != step.digest:
                return RecordDifference(step.step, "digest", None, digest, step.digest)
        return None

    def _repeat(self, side: int, step: int) -> None:
        """Replay a step of a run twice, and note whether both replays agree."""
        first, second = (
            self._replay_one(side, "repeating", step, step, "modules") for _ in range(2)
        )
        found = find_in_modules(
            group_by_rank([first.steps[0].fingerprints]),
            group_by_rank([second.steps[0].fingerprints]),
        )
        self._is_repeatable[side] = found is None


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


def _state_of(step: ReplayedStep) -> tuple[str, str]:
    """Return the digests of the weights and of the optimizer's state after a step."""
    return step.digest, step.optimizer_digest
