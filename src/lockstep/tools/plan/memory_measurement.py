"""Running a script on one rank to measure the memory of its training."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lockstep.kernel.errors import RankError, UsageError
from lockstep.launcher.launch import launch
from lockstep.launcher.target import check_target
from lockstep.tools.check.layout_runner import (
    describe_failure,
    log_of,
    read_values,
    record_of,
    redirect_output,
    run_in_session,
    run_script,
)
from lockstep.tools.plan.memory_plan import TrainingMemory

__all__ = ["measure_training"]


def measure_training(
    script: str, arguments: Sequence[str], ranks: int, timeout: float
) -> TrainingMemory:
    """Run the first steps of a script on one rank; return the memory of its training.

    Args:
        script: The file, or a folder with a `__main__.py`.
        arguments: The script's own arguments.
        ranks: The number of ranks of the plan.
        timeout: The time in seconds after which the rank is terminated.

    Raises:
        UsageError: The script does not exist, fails, or takes too few steps with `ls.Trainer`.
    """
    check_target("script", script)
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as name:
        folder = Path(name)
        order = script, tuple(arguments), ranks, name
        try:
            launch(_run_rank, order, 1, timeout=timeout, pass_rank=True)
        except RankError as error:
            raise UsageError(
                f"{script} could not be measured on one rank: {error}\n"
                f"{describe_failure(error, log_of(folder, 0))}"
            ) from None
        measured = list(read_values(record_of(folder, 0)))
    if not measured:
        raise UsageError(
            f"{script} ended before its first ls.Trainer had taken enough steps to measure its "
            "memory: let it take 3 steps or more"
        )
    (training,) = measured
    assert isinstance(training, TrainingMemory)
    return training


def _run_rank(rank: int, script: str, arguments: Sequence[str], ranks: int, name: str) -> None:
    from lockstep.tools.plan.memory_session import MemorySession
    from lockstep.tools.plan.meta_trainer import replace_trainer

    def make_session(record: Callable[[TrainingMemory], None]) -> MemorySession:
        session = MemorySession(record, ranks)
        replace_trainer(session)
        return session

    folder = Path(name)
    redirect_output(log_of(folder, rank))
    run_in_session(rank, folder, "", make_session, partial(run_script, script, arguments))
