"""Running a script on one rank to measure the memory of its training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.kernel.errors import UsageError
from lockstep.launcher.target import check_target
from lockstep.tools.check.session_launch import launch_session, run_script
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
        UsageError: The script does not exist, fails, or takes too few steps.
    """
    check_target("script", script)
    run = launch_session(_start, (script, tuple(arguments), ranks), timeout=timeout)
    if run.error is not None:
        raise UsageError(f"{script} could not be measured on one rank: {run.error}\n{run.details}")
    (measured,) = run.values
    if not measured:
        raise UsageError(
            f"{script} ended before its first training had taken enough steps to measure its "
            "memory: let ls.Trainer, or the loop of ls.exact, take 3 steps or more"
        )
    (training,) = measured
    assert isinstance(training, TrainingMemory)
    return training


def _start(
    record: Callable[[TrainingMemory], None],
    folder: Path,
    script: str,
    arguments: Sequence[str],
    ranks: int,
) -> tuple[Any, Callable[[], None]]:
    """Return the session of the rank, and a function that runs the script."""
    from lockstep.tools.plan.memory_session import MemorySession
    from lockstep.tools.plan.meta_trainer import replace_trainer

    session = MemorySession(record, ranks)
    replace_trainer(session)
    return session, partial(run_script, script, arguments)
