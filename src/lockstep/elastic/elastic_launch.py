"""Launches a script in an elastic run, whose number of ranks changes while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from lockstep.elastic.rounds import Rounds
from lockstep.launcher.launch_config import LaunchConfig
from lockstep.launcher.launch_script import (
    RunFolder,
    launch_script,
    open_store,
    open_supervisor,
    start_rank,
    terminating,
)
from lockstep.launcher.supervisor import RankSupervisor

__all__ = ["Watch", "launch_elastic"]

Watch = Callable[[RankSupervisor, Rounds, Path | None], None]
"""Called with the supervisor of the ranks and the run's folder when the first ranks start."""


def launch_elastic(config: LaunchConfig, watch: Watch | None = None) -> int:
    """Run what `config` describes, with `config.min_nprocs` ranks or more, and wait for it.

    Args:
        config: The program and the options of the launch.
        watch: Called with the supervisor of the ranks.

    Returns:
        As `launch_script`.

    Raises:
        LockstepError: As for `launch_script`.
        Interrupted: As for `launch_script`.
    """
    with ExitStack() as opened:

        def start(config: LaunchConfig, folder: RunFolder) -> RankSupervisor:
            ranks, rounds = _start(config, folder, opened)
            if watch is not None:
                watch(ranks, rounds, folder.path)
            return ranks

        return launch_script(config, start)


def _start(
    config: LaunchConfig, folder: RunFolder, opened: ExitStack
) -> tuple[RankSupervisor, Rounds]:
    assert config.min_nprocs is not None
    ranks = open_supervisor(config, folder, range(0))

    def start_member(member: int, rank: int, variables: dict[str, str]) -> None:
        start_rank(config, folder, ranks, member, rank, {**folder.variables(), **variables})

    with terminating(ranks):
        rounds = Rounds(
            ranks,
            start_member,
            open_store(config, ranks),
            wanted=config.nprocs,
            at_least=config.min_nprocs,
            folder=folder.path,
        )
        opened.enter_context(contextlib.closing(rounds))
        rounds.begin()
    return ranks, rounds
