"""The comparison: many cases, in few worlds of real processes, with the plain reference.

    references     two processes without Lockstep share the cases
    legs           a world for each width and backend goes through a list of cases in turn
    a failure      ends its world at once; its case is run again by itself, the others go on

What a case saves on its way into another layout lies in a folder of its own.
"""

from __future__ import annotations

import importlib
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch.distributed as dist

import lockstep as ls
import pytest_lockstep
from grammar import plain
from grammar.layouts import widths
from grammar.outcome import Outcome

GRAMMARS = {"trainer": "grammar.training", "exact": "grammar.own_loops"}
"""The modules that draw a training, and that train it in plain PyTorch and in Lockstep."""

DEADLINE = 60.0  # seconds that a rank waits for another one
CASES_A_WORLD = 40
PROCESSES = 2  # that compute the references

T = TypeVar("T")

Job = tuple[int, int]
"""A seed and the number of a leg."""

Result = Outcome | str
"""What a rank made of a job: its outcome, or the type and sentence of an error."""


@dataclass
class Tally:
    """The counts of a comparison, and what went wrong."""

    cases: int = 0
    agreements: int = 0
    layouts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add what another comparison counted."""
        self.cases += other.cases
        self.agreements += other.agreements
        self.layouts += other.layouts
        self.refusals += other.refusals
        self.failures += other.failures

    @property
    def summary(self) -> str:
        """The counts in one line."""
        return (
            f"{self.cases} cases: {self.agreements} agree with the reference, "
            f"{self.refusals.total()} are refused on purpose, {len(self.failures)} fail"
        )

    def __str__(self) -> str:
        """Return the summary, what was refused and where, and each failure."""
        layouts = ", ".join(f"{count} x {name}" for name, count in self.layouts.most_common())
        lines = [self.summary, f"{len(self.layouts)} layouts: {layouts}"]
        lines += [f"refused {count} times: {name}" for name, count in self.refusals.most_common()]
        return "\n".join([*lines, *self.failures])


def compare(seeds: Iterable[int], grammar: str = "trainer") -> Tally:
    """Run the cases of these seeds and compare each with the reference.

    Args:
        seeds: The seeds of the cases.
        grammar: The name of the grammar that draws them.
    """
    return _Comparison(seeds, grammar).run()


def module_of(grammar: str) -> Any:
    """Return the module of a grammar."""
    return importlib.import_module(GRAMMARS[grammar])


# --- on the ranks ---------------------------------------------------------------------------------


def plain_outcomes(grammar: str, seeds: Sequence[int], processes: int) -> dict[int, Result]:
    """Return the reference's outcomes of this process's part of the cases."""
    plain.prepare()
    warnings.simplefilter("ignore")
    module = module_of(grammar)
    own = seeds[int(os.environ["RANK"]) :: processes]
    return {seed: _caught(module.reference_of, module.draw(seed)) for seed in own}


def outcomes(grammar: str, jobs: Sequence[Job], backend: str, folder: Path) -> list[Result]:
    """Return this rank's results of the jobs up to the first that failed on some rank."""
    warnings.simplefilter("ignore")
    module = module_of(grammar)
    ls.init(backend=backend, timeout=DEADLINE)
    found: list[Result] = []
    try:
        for seed, number in jobs:
            drawn = module.draw(seed)
            leg = drawn.legs[number]
            found.append(_caught(module.outcome_of, drawn, leg, folder))
            allowed = module.refusals(drawn, leg.layout)
            allowed += module.possible_refusals(drawn, leg.layout)
            if isinstance(found[-1], str) and not _sentence(found[-1], allowed):
                break
            dist.barrier()
    except Exception as error:  # another rank has left: it says why
        found.append(_said(error))
    finally:
        ls.shutdown()
    return found


def _sentence(result: str, allowed: Sequence[str]) -> str:
    """Return the sentence, of those that are allowed, that is in an error's."""
    return next((each for each in allowed if each in result), "")


def _caught(outcome_of: Callable[..., Outcome], *arguments: Any) -> Result:
    try:
        return outcome_of(*arguments)
    except Exception as error:
        return _said(error)


def _said(error: Exception) -> str:
    """Return an error's type and sentence, with where it was raised unless it is Lockstep's own."""
    sentence = f"{type(error).__name__}: {error}"
    if isinstance(error, ls.LockstepError):
        return sentence
    return sentence + "".join(traceback.format_tb(error.__traceback__)[-3:])


# --- in the process that compares -----------------------------------------------------------------


class _Comparison:
    """The cases that are under way, and what is known of each."""

    def __init__(self, seeds: Iterable[int], grammar: str) -> None:
        self.grammar = grammar
        module = module_of(grammar)
        self.tally = Tally()
        self.cases: dict[int, Any] = {}
        self.expected: dict[Job, list[str]] = {}
        self.allowed: dict[Job, list[str]] = {}
        self.references: dict[int, Result] = {}
        for seed in seeds:
            drawn = module.draw(seed)
            self.cases[seed] = drawn
            for number, leg in enumerate(drawn.legs):
                expected = module.refusals(drawn, leg.layout)
                possible = module.possible_refusals(drawn, leg.layout)
                self.expected[seed, number] = expected
                self.allowed[seed, number] = expected + possible

    def run(self) -> Tally:
        """Run every leg of every case; return the tally."""
        trained = [seed for seed in self.cases if not self.expected[seed, 0]]
        for part in called(plain_outcomes, PROCESSES, self.grammar, trained, PROCESSES):
            self.references |= part
        jobs = [(seed, 0) for seed in self.cases]
        with TemporaryDirectory() as folder:
            while jobs:
                jobs = self._run(jobs, Path(folder))
        return self.tally

    def _run(self, jobs: list[Job], folder: Path) -> list[Job]:
        """Run some legs, grouped by their worlds; return those that come next."""
        worlds: dict[tuple[int, str], list[Job]] = {}
        for seed, number in jobs:
            layout = self.cases[seed].legs[number].layout
            worlds.setdefault((layout.world, layout.backend), []).append((seed, number))
        following: list[Job] = []
        for (world, backend), theirs in worlds.items():
            for begin in range(0, len(theirs), CASES_A_WORLD):
                some = theirs[begin : begin + CASES_A_WORLD]
                following += self._in_worlds(some, world, backend, folder)
        return following

    def _in_worlds(self, jobs: list[Job], world: int, backend: str, folder: Path) -> list[Job]:
        """Run legs in one world after another, each up to its first failure."""
        following: list[Job] = []
        while jobs:
            found = launched(self.grammar, jobs, world, backend, folder)
            for job, results in zip(jobs, found, strict=False):
                trouble = self._trouble(job, results)
                if trouble and len(jobs) > 1:  # by itself, to see whether it is its own fault
                    (results,) = launched(self.grammar, [job], world, backend, folder)
                    again = self._trouble(job, results)
                    trouble = again or f"only after other cases in the same world: {trouble}"
                if trouble:
                    self.tally.cases += 1
                    self.tally.failures.append(f"{self.cases[job[0]]}\n    FAILED     {trouble}")
                else:
                    following += self._after(job, results)
            jobs = jobs[len(found) :]
        return following

    def _trouble(self, job: Job, results: Sequence[Result]) -> str:
        """Say what is wrong with the results of a leg, one for each rank; nothing if they agree."""
        expected = self.expected[job]
        reference = self.references.get(job[0], "not computed")
        begin = self.cases[job[0]].legs[job[1]].begin
        for rank, result in enumerate(results):
            if isinstance(result, str):
                if not _sentence(result, self.allowed[job]):
                    return f"rank {rank}: {result}"
            elif expected:
                return f"rank {rank} was not refused with one of {expected}"
            elif any(isinstance(each, str) for each in results):
                return f"rank {rank} was not refused, and another one was"
            elif isinstance(reference, str):
                return f"the reference: {reference}"
            elif differing := reference.differences(result, begin):
                return f"rank {rank} differs from the reference in {', '.join(differing)}"
        return ""

    def _after(self, job: Job, results: Sequence[Result]) -> list[Job]:
        """Count a leg that went well; return the one that follows it."""
        seed, number = job
        legs = self.cases[seed].legs
        if isinstance(results[0], Outcome) and number + 1 < len(legs):
            return [(seed, number + 1)]
        self.tally.cases += 1
        if isinstance(results[0], Outcome):
            self.tally.agreements += 1
            self.tally.layouts[widths([leg.layout for leg in legs])] += 1
        else:
            self.tally.refusals[_sentence(results[0], self.allowed[job])] += 1
        return []


def called(function: Callable[..., T], world: int, *arguments: Any) -> list[T]:
    """Return what each rank's call returns; the ranks join no group by themselves."""
    how: Any = {"ranks": world, "timeout": 20 * DEADLINE, "init": False}
    return pytest_lockstep.run(function, *arguments, **how)


def launched(
    grammar: str, jobs: list[Job], world: int, backend: str, folder: Path
) -> list[tuple[Result, ...]]:
    """Run legs in a world; return for each the ranks' results, up to the first that failed."""
    try:
        found = called(outcomes, world, grammar, jobs, backend, folder)
    except ls.LockstepError as error:  # a rank died: which leg it was is seen one by one
        if len(jobs) == 1:
            return [(f"{type(error).__name__}: {error}",)]
        return [launched(grammar, [job], world, backend, folder)[0] for job in jobs]
    return list(zip(*(each[: min(map(len, found))] for each in found), strict=True))
