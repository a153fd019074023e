"""Measures one case: contenders start, have their parameters checked, and take turns.

start     the ranks of every contender; from here on they sleep when it is not their turn
train     two steps; the parameters are compared with one process's (answers.py)
rounds    alone  copies  ddp-gloo  trainer        a block of steps each, slowest rank
          copies  ddp-gloo  trainer  alone        another one begins
memory    a few steps more, watched, not timed
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field

from benchmarks.participant import Participant
from benchmarks.rank_processes import Rendezvous, TimingResult, TorchRunner
from benchmarks.step.answers import Answer, Expected
from benchmarks.step.contenders import CONTENDERS, Case, Contender
from benchmarks.step.memory import Watch, proportional
from benchmarks.step.worker import main
from lockstep.tools.bench.ranks import rotate

__all__ = ["ALONE", "BLOCK", "COPIES", "MEMCPY", "MIN_ROUNDS", "Outcome", "measure_case"]

ALONE = "alone"
COPIES = "copies"
MEMCPY = "memcpy"
BLOCK = 0.4  # seconds that a block should last
MAX_BLOCK_CALLS = 50  # steps of a block at most
MIN_CALLS = 9  # steps of a contender at least
MIN_ROUNDS = 3  # at least
WATCHED = 3  # steps under watch

Log = Callable[[str], None]


@dataclass
class Outcome(TimingResult):
    """What a contender did in one case: seconds a step, ascending; memory in bytes.

    `blocks` are the median steps of its blocks, in the order of the rounds. `error` is set if it
    could not be measured. Memory is what the ranks held beyond what they had before the model was
    built.
    """

    name: str
    case: Case
    ranks: int
    times: list[float] = field(default_factory=list)
    answer: Answer | None = None
    rank_bytes: int = 0
    host_bytes: int = 0
    error: str = ""
    blocks: list[float] = field(default_factory=list)


@dataclass
class StepParticipant(Participant):
    """A line of the table: ranks that train in one contender, all of them or only the first."""

    outcome: Outcome
    contender: Contender
    runner: TorchRunner
    alone: bool = False
    calls: int = 1
    rounds: int = 0
    least_rounds: int = MIN_ROUNDS

    def is_done(self, seconds: float) -> bool:
        """Return whether it has had its time, or has failed."""
        times = self.outcome.times
        enough = self.rounds >= self.least_rounds and len(times) >= MIN_CALLS
        return bool(self.outcome.error) or (enough and sum(times) >= seconds)


def measure_case(
    case: Case,
    names: Sequence[str],
    ranks: int,
    seconds: float,
    timeout: float,
    log: Log,
    rounds: int = MIN_ROUNDS,
    block: float = BLOCK,
) -> list[Outcome]:
    """Measure a case with the contenders in `names`, for at least `seconds` each.

    There are at least `rounds` rounds, in blocks of about `block` seconds. `log` is called
    with each stage of the work. A rank that ends raises, and ends the measurement.
    """
    with ExitStack() as opened:
        rendezvous = opened.enter_context(closing(Rendezvous(ranks, timeout)))
        log("one process, for the right answers")
        expected = Expected.of(case, ranks, rendezvous.folder, timeout)
        participants = []
        for name in names:
            log(f"starting {ranks} ranks of {name}")
            runner = TorchRunner(name, rendezvous, main)
            opened.callback(runner.end)
            participants.append(
                StepParticipant(Outcome(name, case, ranks), CONTENDERS[name], runner)
            )
        before = {
            one.contender.name: [proportional(pid) for pid in one.runner.pids]
            for one in participants
        }
        for one in participants:
            log(f"building {one.contender.name}")
            begin(one, expected, rendezvous.folder, block)
            one.least_rounds = rounds
        first = [one for one in participants if one.contender.name == COPIES]
        for one in first:
            alone = Outcome(ALONE, case, ranks, error=one.outcome.error)
            participants.insert(
                0,
                StepParticipant(alone, one.contender, one.runner, alone=True, least_rounds=rounds),
            )
        take_turns(participants, seconds, log)
        for one in participants:
            if not one.outcome.error:
                log(f"memory of {one.outcome.name}")
                watch(one, before[one.contender.name])
    return [one.outcome for one in participants]


def begin(one: StepParticipant, expected: Expected, folder: str, block: float) -> None:
    """Let a contender train its first steps, compare its parameters, and find its block's size."""
    file = f"{folder}/{one.contender.name}"
    one.ask({"train": asdict(one.outcome.case), "file": file})
    if one.outcome.error:
        return
    if one.contender.average:
        one.outcome.answer = expected.compare(file)
        os.unlink(file)
    if times := one.block(2):
        one.calls = max(1, min(MAX_BLOCK_CALLS, round(block / statistics.median(times))))


def take_turns(participants: list[StepParticipant], seconds: float, log: Log) -> None:
    """Run blocks until each contender has had its time."""
    for number in rotate(len(participants)):
        left = [one for one in participants if not one.is_done(seconds)]
        if not left:
            return
        one = participants[number]
        if one not in left:
            continue
        log(f"{one.outcome.name}, {len(left)} of {len(participants)} go on")
        if times := one.block(one.calls):
            one.outcome.times += times
            one.outcome.blocks.append(statistics.median(times))
        one.outcome.times.sort()
        one.rounds += 1


def watch(one: StepParticipant, before: list[int]) -> None:
    """Run a few steps while the memory of the ranks is looked at."""
    pids = one.runner.pids[:1] if one.alone else one.runner.pids
    with Watch(pids) as held:
        one.block(WATCHED)
    one.outcome.rank_bytes = max(0, held.rank - max(before[: len(pids)]))
    one.outcome.host_bytes = max(0, held.host - sum(before[: len(pids)]))
