"""`lockstep chaos`: a run whose ranks are killed, compared with an undisturbed run.

undisturbed   step 0 │ step 1 │ step 2 │ ...               ──> digest, duration of a step
with kills    step 0 │ ste x   step 1 │ step 2 │ ...       ──> digest, rounds
                         └ SIGKILL to a rank, by a thread that follows the record
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lockstep.elastic.coordinator import ElasticCoordinator
from lockstep.elastic.elastic_launch import launch_elastic
from lockstep.kernel.errors import LockstepError, UsageError
from lockstep.launcher.launch_config import LaunchConfig
from lockstep.launcher.launch_script import RunFolder, StartedRanks, launch_script, start_ranks
from lockstep.launcher.run_folder import RECORD_FILE, find_linked_runs, locate_renamed
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.record.columns import as_float
from lockstep.record.reader import Run, read_run
from lockstep.tools.check.killer import Kill, Killer, plan_kills

__all__ = ["Baseline", "ChaosResult", "disturb", "read_baseline", "train_undisturbed"]


@dataclass(frozen=True)
class Baseline:
    """The digest and the durations of an undisturbed run.

    Attributes:
        folder: The folder of the run.
        digest: The digest of the final weights.
        steps: The number of steps.
        step_seconds: The median duration of a step, in seconds.
        seconds: The duration of the run, in seconds.
    """

    folder: Path
    digest: str
    steps: int
    step_seconds: float
    seconds: float


@dataclass(frozen=True)
class ChaosResult:
    """The results of the disturbed run and of the undisturbed one.

    Attributes:
        baseline: The undisturbed run.
        folder: The folder of the disturbed run. None: it has no record.
        digest: The digest of the final weights of the disturbed run. None: it did not finish.
        planned: The number of planned kills.
        kills: The kills that were carried out.
        repeated: The micro-batches that were computed again, as the rank that writes the record
            counts its own.
        seconds_lost: For each round that began after a kill, the seconds until the interrupted
            step began again, with those of the repeated work.
        rounds: The number of rounds.
        seconds: The duration of the disturbed run, in seconds.
        failure: The reason for its failure; "" if it succeeded.
    """

    baseline: Baseline
    folder: Path | None
    digest: str | None
    planned: int
    kills: list[Kill]
    seconds_lost: list[float]
    repeated: int
    rounds: int
    seconds: float
    failure: str = ""

    @property
    def equal(self) -> bool:
        """Whether the weights of both runs have the same bits."""
        return self.digest == self.baseline.digest

    @property
    def is_passed(self) -> bool:
        """Whether all kills were carried out and the weights are equal."""
        return self.equal and len(self.kills) == self.planned and not self.failure

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
            "repeated_microbatches": self.repeated,
            "seconds": self.seconds,
            "baseline_seconds": self.baseline.seconds,
            "run": None if self.folder is None else str(self.folder),
            "baseline_run": str(self.baseline.folder),
            "failure": self.failure or None,
            "deaths": [asdict(kill) for kill in self.kills],
        }


def train_undisturbed(config: LaunchConfig) -> Baseline:
    """Train without elasticity and without kills.

    Raises:
        LockstepError: The run failed, or recorded no digest or no steps.
        Interrupted: A signal asked this process to stop.
    """
    launched: list[Path | None] = []

    def start(config: LaunchConfig, folder: RunFolder) -> StartedRanks:
        launched.append(folder.path)
        return start_ranks(config, folder)

    begun = time.monotonic()
    launch_script(dataclasses.replace(config, min_nprocs=None), start)
    seconds = time.monotonic() - begun
    folder = _find_record(launched[-1])
    if folder is None:
        raise UsageError(
            f"{config.target} recorded no run to compare: it must train with ls.Trainer or "
            "ls.exact, whose loggers= include a run folder (the default under a launcher)"
        )
    return read_baseline(folder, seconds)


def read_baseline(folder: Path, seconds: float) -> Baseline:
    """Return the digest and the durations of a finished run, which took `seconds`.

    Raises:
        UsageError: The run has no digest or no steps.
        FileError: Its record cannot be read.
    """
    run = read_run(folder)
    digest = _digest(run)
    if digest is None or not len(run.steps):
        raise UsageError(
            f"{run.folder} has no digest of its weights to compare with: it must have trained with "
            "ls.Trainer or ls.exact, recorded its steps, and finished"
        )
    step_seconds = float(np.median(np.diff(run.steps.t, prepend=0.0)))
    return Baseline(run.folder, digest, len(run.steps), step_seconds, seconds)


def disturb(
    config: LaunchConfig,
    baseline: Baseline,
    kills: int,
    seed: int,
    report: Callable[[str], None],
) -> ChaosResult:
    """Train with kills at random moments.

    Args:
        config: The launch of the elastic run.
        baseline: The undisturbed run.
        kills: The number of kills.
        seed: The seed of the plan of the kills.
        report: Called with each line about the progress.

    Raises:
        Interrupted: A signal asked this process to stop.
    """
    planned = plan_kills(kills, baseline.steps, config.nprocs, seed)
    killer = Killer(planned, baseline.step_seconds, report)
    launched: list[tuple[ElasticCoordinator, Path | None]] = []

    def watch(ranks: RankSupervisor, rounds: ElasticCoordinator, folder: Path | None) -> None:
        launched.append((rounds, folder))
        if folder is not None:
            killer.begin(ranks, rounds, folder)

    failure = ""
    begun = time.monotonic()
    with killer:
        try:
            launch_elastic(config, watch)
        except LockstepError as error:
            failure = str(error)
    seconds = time.monotonic() - begun
    rounds, launch = launched[-1] if launched else (None, None)
    folder = _find_record(launch)
    run = None if folder is None else read_run(folder)
    lines = [] if run is None else run.rounds
    return ChaosResult(
        baseline=baseline,
        folder=folder,
        digest=None if run is None else _digest(run),
        planned=kills,
        kills=killer.kills,
        seconds_lost=[] if run is None else _measure_losses(run),
        repeated=sum(line.get("repeated_microbatches", 0) for line in lines),
        rounds=0 if rounds is None else rounds.number + 1,
        seconds=seconds,
        failure=failure,
    )


def _measure_losses(run: Run) -> list[float]:
    """Return the seconds that each round with a death cost."""
    return [
        as_float(line.get("continued")) - as_float(line.get("noticed")) + as_float(line["undone"])
        for line in run.rounds
        if line.get("lost")
    ]


def _find_record(launch: Path | None) -> Path | None:
    """Return the folder with the record of a launch that has ended; None if there is none."""
    if launch is None:
        return None
    launch = locate_renamed(launch)
    folders = (launch, *find_linked_runs(launch))
    return next((folder for folder in folders if (folder / RECORD_FILE).is_file()), None)


def _digest(run: Run) -> str | None:
    digest = (run.end or {}).get("digest") if run.state == "done" else None
    return digest if isinstance(digest, str) else None
