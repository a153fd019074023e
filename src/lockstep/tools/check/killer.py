"""The kills of `lockstep chaos`: their plan, and the thread that carries them out.

A plan depends only on the seed and on the numbers of kills, steps and ranks. It names positions in
the training, not times: the same plan kills in the same steps on every machine.

The ranks run unchanged code, and the kills come from outside: a thread of the launching process
reads the lines of the record as they are written, and sends a signal when the planned part of a
step has passed. A rank is killed only while another rank has the state of the training.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from lockstep.elastic.coordinator import ElasticCoordinator
from lockstep.launcher.run_folder import RECORD_FILE, find_linked_runs
from lockstep.launcher.supervisor import RankSupervisor

__all__ = ["Kill", "Killer", "PlannedKill", "plan_kills"]

POLL = 0.001  # seconds between two looks at the record


@dataclass(frozen=True, order=True)
class PlannedKill:
    """One kill.

    Attributes:
        step: The step that is interrupted, from 0.
        part: The position within that step, from 0 to 1.
        rank: The rank; modulo n if only n ranks are left.
    """

    step: int
    part: float
    rank: int


@dataclass(frozen=True)
class Kill:
    """A kill that was carried out.

    Attributes:
        member: The number of the killed member.
        rank: The rank of the member at that time.
        step: The interrupted step.
    """

    member: int
    rank: int
    step: int


def plan_kills(kills: int, steps: int, nprocs: int, seed: int) -> list[PlannedKill]:
    """Return kills in the order of their positions; several may be in the same step.

    Args:
        kills: The number of kills.
        steps: The number of steps of the training.
        nprocs: The number of ranks.
        seed: The random seed.
    """
    draw = random.Random(seed)
    return sorted(
        PlannedKill(draw.randrange(steps), draw.random(), draw.randrange(nprocs))
        for _ in range(kills)
    )


class Killer:
    """A thread that kills ranks as planned, until the `with` block ends.

    Args:
        planned: The planned kills, in the order of their positions.
        step_seconds: The duration of a step in an undisturbed run.
        report: Called with each line about the progress.

    Attributes:
        kills: The kills that were carried out.
    """

    def __init__(
        self, planned: Sequence[PlannedKill], step_seconds: float, report: Callable[[str], None]
    ) -> None:
        self.kills: list[Kill] = []
        self._planned = planned
        self._step_seconds = step_seconds
        self._report = report
        self._file: BinaryIO | None = None
        self._rest = b""
        self._steps = -1  # number of recorded steps; -1 before the first line
        self._round = 0  # the latest recorded round
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, ranks: RankSupervisor, rounds: ElasticCoordinator, launch: Path) -> None:
        """Start to follow the record of a launch, in its folder or in one that it links to."""
        run = (ranks, rounds, launch)
        self._thread = threading.Thread(target=self._run, args=run, name="chaos", daemon=True)
        self._thread.start()

    def __enter__(self) -> Killer:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._file is not None:
            self._file.close()

    def _run(self, ranks: RankSupervisor, rounds: ElasticCoordinator, launch: Path) -> None:
        trained: frozenset[int] = frozenset()  # the members of the latest recorded round
        for planned in self._planned:
            while self._steps < planned.step and not self._ended.wait(POLL):
                self._read(launch)
            until = time.monotonic() + planned.part * self._step_seconds
            while self._steps == planned.step and time.monotonic() < until:
                self._ended.wait(POLL)
                self._read(launch)
            is_killed = False
            while not is_killed and not self._ended.wait(POLL):
                self._read(launch)
                if self._round == rounds.number:
                    trained = frozenset(rounds.members)
                is_killed = self._kill(planned, ranks, rounds.members, trained)

    def _kill(
        self,
        planned: PlannedKill,
        ranks: RankSupervisor,
        members: Sequence[int],
        trained: frozenset[int],
    ) -> bool:
        """Kill a rank if another one can continue; return whether it was killed."""
        dead = {kill.member for kill in self.kills}
        running = [
            (rank, member)
            for rank, member in enumerate(members)
            if member in ranks.processes.pids and member not in dead and _runs(ranks, member)
        ]
        if not running:
            return False
        rank, member = running[planned.rank % len(running)]
        if not trained.intersection(other for _, other in running) - {member}:
            return False
        try:
            os.kill(ranks.processes.pids[member], signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.kills.append(Kill(member, rank, self._steps))
        self._report(
            f"kill {len(self.kills)} of {len(self._planned)}: member {member} (rank {rank}) in "
            f"step {self._steps:,}"
        )
        return True

    def _read(self, launch: Path) -> None:
        """Read the lines that were written since the last call."""
        for folder in (launch, *find_linked_runs(launch)) if self._file is None else ():
            with contextlib.suppress(OSError):
                self._file = (folder / RECORD_FILE).open("rb")
                break
        if self._file is None:
            return
        lines = (self._rest + self._file.read()).split(b"\n")
        self._rest = lines.pop()
        for text in lines:
            try:
                line = orjson.loads(text)
            except orjson.JSONDecodeError:  # the line that a killed rank was writing
                continue
            if line["kind"] == "step":
                self._steps = line["step"] + 1
            elif line["kind"] == "round":
                self._steps = line["step"]
                self._round = line["round"]
            else:
                self._steps = max(self._steps, 0)


def _runs(ranks: RankSupervisor, member: int) -> bool:
    outcome = ranks.processes.outcomes.get(member)
    return outcome is not None and outcome.status is None
