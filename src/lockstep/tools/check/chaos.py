"""`lockstep chaos`: a run whose ranks are killed, compared with an undisturbed run.

undisturbed   step 0 │ step 1 │ step 2 │ ...               ──> digest, duration of each step
with kills    step 0 │ ste x   step 1 │ step 2 │ ...       ──> digest, rounds
                         └ SIGKILL to a rank, by a thread that follows the record
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np

from lockstep.elastic.coordinator import ElasticCoordinator
from lockstep.elastic.elastic_launch import launch_elastic
from lockstep.kernel.errors import LockstepError, UsageError
from lockstep.launcher.launch_config import LaunchConfig
from lockstep.launcher.launch_script import RunFolder, launch_script, start_ranks
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.record.reader import Run, read_run
from lockstep.tools.check.chaos_result import Baseline, ChaosResult, measure_kills
from lockstep.tools.check.kill_plan import plan_kills
from lockstep.tools.check.killer import Killer
from lockstep.tools.check.record_follower import RecordFollower, Report

__all__ = ["disturb", "read_baseline", "train_undisturbed"]


def train_undisturbed(config: LaunchConfig, report: Report) -> Baseline:
    """Train without elasticity and without kills.

    Raises:
        LockstepError: The run failed, or recorded no digest or no steps.
        Interrupted: A signal asked this process to stop.
    """
    follower = RecordFollower(report)

    def start(config: LaunchConfig, folder: RunFolder) -> RankSupervisor:
        follower.begin(folder.path)
        return start_ranks(config, folder)

    begun = time.monotonic()
    with follower:
        launch_script(dataclasses.replace(config, min_nprocs=None), start)
    seconds = time.monotonic() - begun
    return read_baseline(follower.require_folder(config.target), seconds)


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
            "ls.Trainer, recorded its steps, and finished"
        )
    return Baseline(run.folder, digest, np.diff(run.steps.t, prepend=0.0), seconds)


def disturb(
    config: LaunchConfig, baseline: Baseline, kills: int, seed: int, report: Report
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
    planned = plan_kills(kills, len(baseline.intervals), config.nprocs, seed)
    killer = Killer(planned, baseline.intervals, report)

    def watch(ranks: RankSupervisor, rounds: ElasticCoordinator, folder: Path | None) -> None:
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
    digest = (run.end or {}).get("digest") if run.state == "done" else None
    return digest if isinstance(digest, str) else None
