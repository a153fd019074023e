"""The race of one case: contenders start, prove their parameters, and take turns.

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

from benchmarks.runner import Runner
from benchmarks.step.answers import Answer, Expected
from benchmarks.step.memory import Watch, proportional
from benchmarks.step.rank import main
from benchmarks.step.ways import WAYS, Case, Way
from lockstep.bench.peers import Meeting, TorchPeer
from lockstep.bench.rounds import rotation
from lockstep.bench.times import Timed

__all__ = ["ALONE", "COPIES", "Outcome", "race"]

ALONE, COPIES = "alone", "copies"
BLOCK = 0.4  # seconds that a block should last
LONGEST = 50  # steps of a block at most
FEWEST = 9  # steps of a contender at least
ROUNDS = 3  # at least
WATCHED = 3  # steps under watch

Say = Callable[[str], None]


@dataclass
class Outcome(Timed):
    """What a contender did in one case: seconds a step, ascending; memory in bytes.

    `cannot` says why it did nothing. Memory is what the ranks held beyond what they
    had before the model was built.
    """

    name: str
    case: Case
    ranks: int
    times: list[float] = field(default_factory=list)
    answer: Answer | None = None
    rank_bytes: int = 0
    host_bytes: int = 0
    cannot: str = ""


@dataclass
class Contender(Runner):
    """A line of the table: ranks that train in one way, all of them or only the first."""

    outcome: Outcome
    way: Way
    peer: TorchPeer
    alone: bool = False
    calls: int = 1
    rounds: int = 0

    def is_done(self, seconds: float) -> bool:
        """Whether it has had its time, or cannot."""
        times = self.outcome.times
        enough = self.rounds >= ROUNDS and len(times) >= FEWEST
        return bool(self.outcome.cannot) or (enough and sum(times) >= seconds)


def race(
    case: Case, names: Sequence[str], ranks: int, seconds: float, patience: float, say: Say
) -> list[Outcome]:
    """Measure a case on the ways in `names`, at least `seconds` each; a process alone comes first.

    `say` is told what goes on. A rank that ends raises, and ends the measurement.
    """
    with ExitStack() as opened:
        meeting = opened.enter_context(closing(Meeting(ranks, patience)))
        say("one process, for the right answers")
        expected = Expected.of(case, ranks, meeting.folder, patience)
        racing = []
        for name in names:
            say(f"starting {ranks} ranks of {name}")
            peer = TorchPeer(name, meeting, main)
            opened.callback(peer.end)
            racing.append(Contender(Outcome(name, case, ranks), WAYS[name], peer))
        before = {one.way.name: [proportional(pid) for pid in one.peer.pids] for one in racing}
        for one in racing:
            say(f"building {one.way.name}")
            begin(one, expected, meeting.folder)
        first = [one for one in racing if one.way.name == COPIES]
        for one in first:
            alone = Outcome(ALONE, case, ranks, cannot=one.outcome.cannot)
            racing.insert(0, Contender(alone, one.way, one.peer, alone=True))
        take_turns(racing, seconds, say)
        for one in racing:
            if not one.outcome.cannot:
                say(f"memory of {one.outcome.name}")
                watch(one, before[one.way.name])
    return [one.outcome for one in racing]


def begin(one: Contender, expected: Expected, folder: str) -> None:
    """Let a contender train its first steps, compare its parameters, and find its block's size."""
    file = f"{folder}/{one.way.name}"
    one.ask({"train": asdict(one.outcome.case), "file": file})
    if one.outcome.cannot:
        return
    if one.way.average:
        one.outcome.answer = expected.compare(file)
        os.unlink(file)
    if times := one.block(2):
        one.calls = max(1, min(LONGEST, round(BLOCK / statistics.median(times))))


def take_turns(racing: list[Contender], seconds: float, say: Say) -> None:
    """Run blocks until each contender has had its time."""
    for number in rotation(len(racing)):
        left = [one for one in racing if not one.is_done(seconds)]
        if not left:
            return
        one = racing[number]
        if one not in left:
            continue
        say(f"{one.outcome.name}, {len(left)} of {len(racing)} go on")
        one.outcome.times += one.block(one.calls)
        one.outcome.times.sort()
        one.rounds += 1


def watch(one: Contender, before: list[int]) -> None:
    """Run a few steps while the memory of the ranks is looked at."""
    pids = one.peer.pids[:1] if one.alone else one.peer.pids
    with Watch(pids) as held:
        one.block(WATCHED)
    one.outcome.rank_bytes = max(0, held.rank - max(before[: len(pids)]))
    one.outcome.host_bytes = max(0, held.host - sum(before[: len(pids)]))
