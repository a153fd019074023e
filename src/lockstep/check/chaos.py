"""`lockstep chaos`: a training whose ranks are killed, compared with an undisturbed one.

    undisturbed   step 0 │ step 1 │ step 2 │ ...               ──> digest, steps, how long each took
    with kills    step 0 │ ste x   step 1 │ step 2 │ ...       ──> digest, rounds
                             └ SIGKILL to a rank, by a thread that follows the record

The kills come from outside of the ranks, so that no code of theirs knows of them: a thread of
the launching process reads the lines of the record as they are written, and sends a signal when
the planned part of a step has passed. A rank is not killed while no other one has the state of the
training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import numpy as np
import orjson

from lockstep.check.kill_plan import PlannedKill, plan_kills
from lockstep.elastic.elastic_launch import launch_elastic
from lockstep.elastic.rounds import Rounds
from lockstep.errors import LockstepError, UsageError
from lockstep.formatting import format_duration, format_quantity
from lockstep.launcher.launch_script import LaunchConfig, RunFolder, launch_script, start_ranks
from lockstep.launcher.run_folder import find_linked_runs
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.record.columns import Column, Line, as_dict, as_float
from lockstep.record.reader import Run, read_run
from lockstep.record.recorder import RECORD_FILE

__all__ = ["Baseline", "ChaosResult", "Kill", "disturb", "measure_kills", "read_baseline"]
__all__ += ["train_undisturbed"]

POLL = 0.001  # seconds between two looks at the record
Report = Callable[[str], None]
"""Shows a line about the progress."""


@dataclass(frozen=True)
class Baseline:
    """What an undisturbed run computed.

    Attributes:
        folder: Its folder.
        digest: The digest of its weights.
        intervals: The seconds from the line of a step to that of the next one.
        seconds: How long it took.
    """

    folder: Path
    digest: str
    intervals: Column
    seconds: float


@dataclass(frozen=True)
class Kill:
    """A kill that was carried out, and what it cost.

    Attributes:
        planned: The plan.
        member: The member that was killed.
        rank: The rank that it had.
        step: The step that was under way.
        time: When it was killed, in Unix time.
        round: The round that began without it; None if none did.
        seconds_to_repeat: From the kill until the repeated step began, in seconds.
        repeated_seconds: The repeated work, in seconds.
    """

    planned: PlannedKill
    member: int
    rank: int
    step: int
    time: float
    round: int | None = None
    seconds_to_repeat: float | None = None
    repeated_seconds: float | None = None

    @property
    def seconds_lost(self) -> float | None:
        """What the kill cost, in seconds; None if that is not known."""
        if self.seconds_to_repeat is None:
            return None
        return self.seconds_to_repeat + (self.repeated_seconds or 0.0)

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found = {name: value for name, value in vars(self).items() if name != "planned"}
        return found | {"part": self.planned.part, "seconds_lost": self.seconds_lost}


@dataclass(frozen=True)
class ChaosResult:
    """What the disturbed run computed, beside the undisturbed one.

    Attributes:
        baseline: The undisturbed run.
        folder: The folder of the disturbed run; None if it has none.
        digest: The digest of its weights; None if it came to no end.
        planned: How many ranks were to be killed.
        kills: Those that were.
        rounds: The number of rounds.
        seconds: How long it took.
        seed: The seed of the plan.
        failure: Why it failed; "" if it did not.
    """

    baseline: Baseline
    folder: Path | None
    digest: str | None
    planned: int
    kills: list[Kill]
    rounds: int
    seconds: float
    seed: int
    failure: str = ""

    @property
    def equal(self) -> bool:
        """Whether the weights have the same bits."""
        return self.digest == self.baseline.digest

    @property
    def is_passed(self) -> bool:
        """Whether every kill was carried out and changed nothing."""
        return self.equal and len(self.kills) == self.planned and not self.failure

    @property
    def seconds_lost(self) -> list[float]:
        """What each kill cost, in seconds, where that is known."""
        return [each.seconds_lost for each in self.kills if each.seconds_lost is not None]

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        lost = self.seconds_lost
        return {
            "kills": len(self.kills),
            "planned": self.planned,
            "rounds": self.rounds,
            "digest": self.digest,
            "baseline_digest": self.baseline.digest,
            "equal": self.equal,
            "median_seconds_lost": median(lost) if lost else None,
            "max_seconds_lost": max(lost, default=None),
            "seconds": self.seconds,
            "baseline_seconds": self.baseline.seconds,
            "seed": self.seed,
            "run": None if self.folder is None else str(self.folder),
            "baseline_run": str(self.baseline.folder),
            "failure": self.failure or None,
            "deaths": [each.plain() for each in self.kills],
        }


def train_undisturbed(config: LaunchConfig, report: Report) -> Baseline:
    """Train without elasticity and kills.

    Raises:
        LockstepError: The training failed, or left no digest.
        Interrupted: A signal asked this process to stop.
    """
    follower = RecordFollower(report)

    def start(config: LaunchConfig, folder: RunFolder) -> RankSupervisor:
        follower.begin(folder.path)
        return start_ranks(config, folder)

    begun = time.monotonic()
    with follower:
        launch_script(dataclasses.replace(config, min_nprocs=None), start)
    found = read_baseline(follower.require_folder(config.target))
    return dataclasses.replace(found, seconds=time.monotonic() - begun)


def read_baseline(folder: Path) -> Baseline:
    """Return what a finished run computed.

    Raises:
        UsageError: There is no such run, or it has no digest or no steps.
        FileError: Its record cannot be read.
    """
    run = read_run(folder)
    digest = _digest(run)
    if digest is None or not len(run.steps):
        raise UsageError(
            f"{run.folder} has no digest of its weights to compare with: it must have trained "
            f"with ls.Trainer, recorded its steps, and come to its end"
        )
    seconds = as_float((run.end or {}).get("t"))
    return Baseline(run.folder, digest, np.diff(run.steps.t, prepend=0.0), seconds)


def disturb(
    config: LaunchConfig, baseline: Baseline, kills: int, seed: int, report: Report
) -> ChaosResult:
    """Train with kills at random moments.

    Args:
        config: What to train, as an elastic run.
        baseline: The undisturbed run.
        kills: The number of kills.
        seed: The seed of their plan.
        report: Shows a line about the progress.

    Raises:
        Interrupted: A signal asked this process to stop.
    """
    planned = plan_kills(kills, len(baseline.intervals), config.nprocs, seed)
    killer = Killer(planned, baseline.intervals, report)

    def watch(ranks: RankSupervisor, rounds: Rounds, folder: Path | None) -> None:
        killer.watch(ranks, rounds)
        killer.begin(folder)

    failure, begun = "", time.monotonic()
    with killer:
        try:
            launch_elastic(config, watch)
        except LockstepError as error:
            failure = str(error)
    seconds = time.monotonic() - begun
    folder = killer.folder
    run = None if folder is None else read_run(folder)
    return ChaosResult(
        baseline,
        folder,
        None if run is None else _digest(run),
        kills,
        measure_kills(killer.kills, [] if run is None else run.rounds),
        killer.count_rounds(),
        seconds,
        seed,
        failure,
    )


def _digest(run: Run) -> str | None:
    found = (run.end or {}).get("digest") if run.state == "done" else None
    return found if isinstance(found, str) else None


def measure_kills(kills: Sequence[Kill], rounds: Sequence[Line]) -> list[Kill]:
    """Return the kills with what they cost, by the record's lines about rounds.

    A round that ends before anybody wrote its line is one pause with the next one.
    """
    lines = {
        as_dict(each).get("member"): line for line in rounds for each in line.get("lost") or ()
    }
    return [
        _measure_kill(each, lines.get(each.member) or _find_next(rounds, each.time))
        for each in kills
    ]


def _find_next(rounds: Sequence[Line], time: float) -> Line | None:
    return next((line for line in rounds if as_float(line.get("noticed")) >= time), None)


def _measure_kill(kill: Kill, line: Line | None) -> Kill:
    if line is None:
        return kill
    continued, undone = as_float(line.get("continued")), as_float(line.get("undone"))
    is_known = math.isfinite(continued)
    return dataclasses.replace(
        kill,
        round=line.get("round"),
        seconds_to_repeat=max(0.0, continued - kill.time) if is_known else None,
        repeated_seconds=undone if math.isfinite(undone) else None,
    )


class RecordFollower:
    """A thread that follows the record of a run which another thread launches.

    Args:
        report: Shows a line about the progress.

    Attributes:
        folder: The folder of the record, as it is called at the end; None before it is found.
    """

    def __init__(self, report: Report) -> None:
        self.folder: Path | None = None
        self._report = report
        self._launch: Path | None = None
        self._file: BinaryIO | None = None
        self._rest = b""
        self._steps = 0  # that are recorded
        self._round = 0  # the latest that is recorded
        self._has_begun = False  # the record has a line
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    def begin(self, launch: Path | None) -> None:
        """Begin to follow the record of a launch, in its folder or in one linked from there."""
        self._launch = launch
        self._thread.start()

    def __enter__(self) -> RecordFollower:
        """Return the follower."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the thread, and find out what the folder of the record is called by now."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._read()
        if self._file is not None:
            self.folder = Path(os.readlink(f"/proc/self/fd/{self._file.fileno()}")).parent
            with contextlib.suppress(ValueError):
                self.folder = self.folder.relative_to(Path.cwd())
            self._file.close()

    def require_folder(self, target: str) -> Path:
        """Return the folder of the record; raise UsageError if the program has written none."""
        if self.folder is None:
            raise UsageError(
                f"{target} recorded no run to compare: it must train with ls.Trainer, whose "
                f"loggers= include a run folder (the default under a launcher)"
            )
        return self.folder

    def _run(self) -> None:
        self._wait(lambda: False)

    def _wait(self, is_over: Callable[[], bool], deadline: float = math.inf) -> bool:
        """Follow the record until something is over; return False if the run ends before.

        Args:
            is_over: Looked at after each look at the record.
            deadline: When to return in any case, in `time.monotonic()` seconds.
        """
        while not self._ended.is_set():
            self._read()
            now = time.monotonic()
            if is_over() or now >= deadline:
                return True
            self._ended.wait(min(POLL, deadline - now))
        return False

    def _read(self) -> None:
        """Read the lines that the record has got since the last time."""
        if self._file is None:
            self._open()
        if self._file is None:
            return
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        self._has_begun = self._has_begun or bool(lines)
        for text in lines:
            with contextlib.suppress(orjson.JSONDecodeError):
                line = as_dict(orjson.loads(text))
                step = line.get("step")
                if line.get("kind") == "step" and type(step) is int:
                    self._steps = step + 1
                elif line.get("kind") in ("round", "resume") and type(step) is int:
                    self._steps = step
                    self._round = line.get("round", self._round)

    def _open(self) -> None:
        if self._launch is None:
            return
        for folder in (self._launch, *find_linked_runs(self._launch)):
            with contextlib.suppress(OSError):
                self._file = (folder / RECORD_FILE).open("rb")
                return


@dataclass
class _Watched:
    """What the thread sees of the launch."""

    ranks: RankSupervisor
    rounds: Rounds
    killed: set[int] = field(default_factory=set)
    trained: frozenset[int] = frozenset()  # the members that went on in the latest recorded round

    def note_round(self, recorded: int) -> None:
        """Take in the number of the latest round in the record."""
        if recorded == self.rounds.number:
            self.trained = frozenset(self.rounds.members)

    def find_ranks(self) -> list[tuple[int, int]]:
        """Return (rank, member) of those that run."""
        return [
            (rank, member)
            for rank, member in enumerate(self.rounds.members)
            if member in self.ranks.pids and member not in self.killed and self._runs(member)
        ]

    def _runs(self, member: int) -> bool:
        outcome = self.ranks.outcomes.get(member)
        return outcome is not None and outcome.status is None


class Killer(RecordFollower):
    """A thread that kills ranks as planned.

    Args:
        planned: The kills, in the order of their moments.
        intervals: The seconds that each step took in an undisturbed run.
        report: Shows a line about the progress.

    Attributes:
        kills: Those that were carried out.
    """

    def __init__(self, planned: Sequence[PlannedKill], intervals: Column, report: Report) -> None:
        super().__init__(report)
        self.kills: list[Kill] = []
        self._planned, self._intervals = planned, intervals
        self._watched: _Watched | None = None

    def watch(self, ranks: RankSupervisor, rounds: Rounds) -> None:
        """Say what launches the ranks, before the thread begins."""
        self._watched = _Watched(ranks, rounds)

    def count_rounds(self) -> int:
        """Return the number of rounds."""
        return 0 if self._watched is None else self._watched.rounds.number + 1

    def _run(self) -> None:
        assert self._watched is not None
        for planned in self._planned:
            if not self._wait_for_moment(planned) or not self._kill(planned, self._watched):
                return
        super()._run()

    def _wait_for_moment(self, planned: PlannedKill) -> bool:
        if not self._wait(lambda: self._has_begun and self._steps >= planned.step):
            return False
        if self._steps > planned.step:  # an earlier kill came late
            return True
        seconds = planned.part * float(self._intervals[planned.step])
        return self._wait(lambda: self._steps > planned.step, time.monotonic() + seconds)

    def _kill(self, planned: PlannedKill, watched: _Watched) -> bool:
        """Kill a rank as soon as another one can go on; return whether that came about."""
        while (chosen := self._choose(planned, watched)) is None:
            if self._ended.wait(POLL):
                return False
            self._read()
        rank, member = chosen
        step, now = self._steps, time.time()
        try:
            os.kill(watched.ranks.pids[member], signal.SIGKILL)
        except ProcessLookupError:
            return self._kill(planned, watched)
        watched.killed.add(member)
        self.kills.append(Kill(planned, member, rank, step, now))
        self._report(
            f"kill {len(self.kills)} of {len(self._planned)}: member {member} (rank {rank}) in "
            f"step {step:,}"
        )
        return True

    def _choose(self, planned: PlannedKill, watched: _Watched) -> tuple[int, int] | None:
        """Return (rank, member) to kill; None while nobody else could go on."""
        watched.note_round(self._round)
        found = watched.find_ranks()
        if not found:
            return None
        rank, member = found[planned.rank % len(found)]
        others = watched.trained.intersection(each for _, each in found) - {member}
        return (rank, member) if others else None


def describe_baseline(found: Baseline) -> str:
    """Return the sentence about the undisturbed run."""
    steps = format_quantity(len(found.intervals), "step")
    return (
        f"undisturbed: {steps} in {format_duration(found.seconds)}, digest {found.digest}, "
        f"in {found.folder}"
    )
