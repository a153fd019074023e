"""Launches a script in an elastic run, whose number of ranks changes while it runs."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from lockstep.comm.transport.listener import MessageListener
from lockstep.comm.transport.secret import SECRET_SIZE, make_secret, warn_without_secret
from lockstep.elastic.agent_hosts import AgentHosts
from lockstep.elastic.coordinator import ElasticCoordinator
from lockstep.elastic.host_agent import HostAgent
from lockstep.elastic.host_connection import PURPOSE
from lockstep.kernel.errors import LockstepError, RankError
from lockstep.launcher.failure_codes import STOPPED
from lockstep.launcher.launch_config import LaunchConfig
from lockstep.launcher.launch_script import (
    Interrupted,
    RunFolder,
    StartedRanks,
    launch_script,
    open_store,
    open_supervisor,
    start_rank,
    terminating,
)
from lockstep.launcher.listening_socket import listen
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.messages import log

__all__ = ["Watch", "launch_elastic"]

NO_SECRET = bytes(SECRET_SIZE)  # the launcher warns that the run has none

Watch = Callable[[RankSupervisor, ElasticCoordinator, Path | None], None]
"""Called with the supervisor of the ranks and the run's folder when the first ranks start."""


def launch_elastic(config: LaunchConfig, watch: Watch | None = None, *, exits: bool = False) -> int:
    """Run what `config` describes, with `config.min_nprocs` ranks or more, and wait for it.

    On a host other than 0, the launcher is an agent of the one of host 0.

    Args:
        config: The program and the options of the launch.
        watch: Called with the supervisor of the ranks; not on a host other than 0.
        exits: As for `launch_script`.

    Returns:
        As `launch_script`.

    Raises:
        LockstepError: As for `launch_script`.
        Interrupted: As for `launch_script`.
    """
    status = 1
    reason = "host 0 has failed"
    with ExitStack() as opened:
        if config.node_rank > 0:
            return launch_script(config, partial(_start_agent, opened), exits=exits)

        def start(config: LaunchConfig, folder: RunFolder) -> StartedRanks:
            started, rounds, hosts = _start(config, folder, opened)
            if hosts is not None:
                opened.callback(lambda: hosts.end(status, reason))
            if watch is not None:
                watch(started.ranks, rounds, folder.path)
            return started

        try:
            status = launch_script(config, start, exits=exits)
            reason = ""
        except Interrupted as interruption:
            has_stopped = interruption.has_stopped
            status = STOPPED if has_stopped else interruption.exit_status
            reason = ""
            raise
        except LockstepError as error:
            status = error.exit_status
            reason = str(error)
            raise
        return status


def _start(
    config: LaunchConfig, folder: RunFolder, opened: ExitStack
) -> tuple[StartedRanks, ElasticCoordinator, AgentHosts | None]:
    assert config.min_nprocs is not None
    ranks = open_supervisor(config, range(0))
    with terminating(ranks):
        hosts = _open_hosts(config, folder, ranks) if config.nnodes > 1 else None

        def start_member(
            member: int, host: int, local_rank: int, variables: dict[str, str]
        ) -> None:
            variables = {**folder.variables(), **variables}
            if hosts is not None and host > 0:
                hosts.start(host, member, local_rank, variables)
            else:
                start_rank(config, folder, ranks, member, local_rank, variables)

        # Agents connect at the port of the options, and members get that of the store from them.
        store_config = config if hosts is None else replace(config, master_port=0)
        rounds = ElasticCoordinator(
            ranks,
            start_member,
            open_store(store_config, ranks),
            wanted=config.elastic_nprocs,
            at_least=config.min_nprocs,
            folder=folder.path,
            nnodes=config.nnodes,
        )
        opened.enter_context(contextlib.closing(rounds))
        if hosts is None:
            rounds.begin()

    def wait(grace: float, is_stop_requested: Callable[[], bool]) -> RankError | None:
        if hosts is not None:
            if not hosts.wait_for_all(is_stop_requested):
                ranks.stop_early()
                return None
            rounds.begin()
        return ranks.wait(grace, is_stop_requested)

    return StartedRanks(ranks, wait), rounds, hosts


def _open_hosts(config: LaunchConfig, folder: RunFolder, ranks: RankSupervisor) -> AgentHosts:
    """Return the other hosts of a run, whose agents it listens for."""
    listening = listen(config.master_addr, config.master_port, is_single_host=False)
    return AgentHosts(
        ranks,
        MessageListener(listening, _find_secret(config), PURPOSE, log),
        nnodes=config.nnodes,
        silence=config.host_timeout,
        folder=folder.path,
        version=_describe_version(),
    )


def _start_agent(opened: ExitStack, config: LaunchConfig, folder: RunFolder) -> StartedRanks:
    hello = {
        "kind": "join",
        "host": config.node_rank,
        "name": socket.gethostname(),
        "nnodes": config.nnodes,
        "version": _describe_version(),
    }
    ranks = open_supervisor(config, range(0))

    def start_member(member: int, local_rank: int, variables: dict[str, str]) -> None:
        start_rank(config, folder, ranks, member, local_rank, variables)

    with terminating(ranks):
        address = config.master_addr, config.master_port
        agent = HostAgent(ranks, start_member, hello, *address, _find_secret(config))
    opened.enter_context(contextlib.closing(agent))
    return StartedRanks(ranks, lambda grace, is_stop_requested: agent.wait(is_stop_requested))


def _find_secret(config: LaunchConfig) -> bytes:
    """Return the secret of the run; without one, what stands for it admits everybody."""
    secret = make_secret(config.secret_file, config.node_rank, os.environ)
    if secret is None and config.node_rank == 0:
        log(warn_without_secret(config.master_addr, config.master_port))
    return NO_SECRET if secret is None else secret


def _describe_version() -> str:
    """Return the versions that all hosts must have for the same bits."""
    own = version("torch-lockstep")
    torch = version("torch")
    return f"Lockstep {own}, torch {torch} and Python {platform.python_version()}"
