"""Measures cases: contenders live for the whole run, prove their losses, and take turns.

start     the ranks of every contender; from here on they sleep when it is not their turn
splits    1, 2, 4, 8 micro-batches, one after another:
  train     two steps, whose losses must be those of one process, and the digests each other's
  rounds    alone  copies  rpc  torch-gloo ...    a block of steps each, slowest rank
            copies  rpc  torch-gloo ...  alone    another one begins
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field

from benchmarks.participant import Participant
from benchmarks.pipeline.case import Case
from benchmarks.pipeline.contenders import ALONE, CONTENDERS, COPIES, STAGES, Contender
from benchmarks.pipeline.worker import main
from benchmarks.rank_processes import Rendezvous, TimingResult, TorchRunner
from lockstep.tools.bench.ranks import rotate

__all__ = [
    "CHECKED",
    "Outcome",
    "PipelineParticipant",
    "ideal",
    "measure_case",
    "start_participants",
]

CHECKED = 2  # steps whose losses are compared: the second knows the first one's gradients
NEAR = 2e-3  # how far losses may be from the right ones: those add in another order
BLOCK = 0.3  # seconds that a block should last
LONG = 1.0  # seconds that a step may take and still be one of several in a block
MAX_BLOCK_CALLS = 200  # steps of a block at most

Log = Callable[[str], None]


@dataclass
class Outcome(TimingResult):
    """What a contender did in one case: seconds a step, ascending; or the error."""

    name: str
    case: Case
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    digest: str = ""
    wrong: str = ""
    error: str = ""


@dataclass
class PipelineParticipant(Participant):
    """The ranks of one contender, or only the first of them."""

    contender: Contender
    runner: TorchRunner
    alone: bool = False
    calls: int = 1
    outcome: Outcome = field(init=False)  # of the case that is measured

    @property
    def name(self) -> str:
        """What the tables call it."""
        return ALONE if self.alone else self.contender.name


@contextmanager
def start_participants(
    names: Sequence[str], timeout: float, log: Log
) -> Iterator[list[PipelineParticipant]]:
    """Start the ranks of each contender, the copies first, and end them all."""
    with ExitStack() as opened:
        participants = []
        for name in dict.fromkeys([COPIES, *names]):
            contender = CONTENDERS[name]
            log(f"starting {contender.ranks} ranks of {name}")
            rendezvous = opened.enter_context(closing(Rendezvous(contender.ranks, timeout)))
            runner = TorchRunner(name, rendezvous, main)
            opened.callback(runner.end)
            if name == COPIES:
                participants.append(PipelineParticipant(contender, runner, alone=True))
            participants.append(PipelineParticipant(contender, runner))
        yield participants


def measure_case(
    participants: Sequence[PipelineParticipant], case: Case, repeats: int, log: Log
) -> list[Outcome]:
    """Measure one case on all of `participants`, `repeats` blocks each.

    A rank that ends raises, and ends the measurement.
    """
    for one in participants:
        one.outcome = Outcome(one.name, case)
    for one in participants:
        if not one.alone:
            log(f"{one.name} trains its first steps")
            begin(one)
    for number, one in enumerate(rotated(participants, repeats)):
        if not one.outcome.error:
            log(f"{one.name}, block {number + 1} of {len(participants) * repeats}")
            one.outcome.times += one.block(one.calls)
            one.outcome.times.sort()
    for one in participants:
        if not one.alone:
            one.ask({"drop": True})
    outcomes = [one.outcome for one in participants]
    judge(outcomes)
    return outcomes


def rotated(
    participants: Sequence[PipelineParticipant], repeats: int
) -> Iterator[PipelineParticipant]:
    """Give everybody's turns; each round begins with another contender."""
    turns = rotate(len(participants))
    for _ in range(len(participants) * repeats):
        yield participants[next(turns)]


def begin(one: PipelineParticipant) -> None:
    """Let a contender train its first steps, and find out how many make a block."""
    case = one.outcome.case
    answers = one.ask({"train": asdict(case), "checked": CHECKED})
    for each in answers:
        one.outcome.losses = one.outcome.losses or each.get("losses", [])
        one.outcome.digest = one.outcome.digest or each.get("digest", "")
    one.calls = 1
    if case.net.seconds < LONG and not one.outcome.error:
        one.block(one.calls)  # it settles
        times = one.block(one.calls)
        if times:
            one.calls = max(1, min(MAX_BLOCK_CALLS, round(BLOCK / max(times[0], 1e-6))))


def judge(outcomes: list[Outcome]) -> None:
    """Say of each outcome whether its losses are those of one process, its digest the others'."""
    right = next(one.losses for one in outcomes if one.name == COPIES)
    digest = next((one.digest for one in outcomes if one.digest), "")
    for one in outcomes:
        if one.name == ALONE or one.error:
            continue
        if len(one.losses) != len(right) or not all(
            math.isclose(*pair, rel_tol=NEAR) for pair in zip(one.losses, right, strict=True)
        ):
            one.wrong = f"losses {one.losses} where one process has {right}"
        elif one.digest and one.digest != digest:
            one.wrong = f"digest {one.digest[:8]} where its peers have {digest[:8]}"


def ideal(single: float, splits: int) -> float:
    """Return the time of a batch in an ideal pipeline: p ranks do (m + p - 1) / (p m) of it."""
    return single * (splits + STAGES - 1) / (STAGES * splits)
