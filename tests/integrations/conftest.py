"""Ranks that have imported the frameworks."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from lockstep.launcher import fork_server

FRAMEWORKS = ("lightning.pytorch", "transformers.trainer", "accelerate")


@pytest.fixture(scope="session")
def framework_servers() -> Iterator[list[fork_server.ForkServer]]:
    """The fork server that has imported the frameworks in 8 s, while no module uses it."""
    servers: list[fork_server.ForkServer] = []
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def forks(
    ranks: Callable[..., list[Any]], framework_servers: list[fork_server.ForkServer]
) -> Iterator[Callable[..., list[Any]]]:
    """As `ranks`, with ranks that have imported the frameworks."""
    run = partial(ranks, timeout=200.0)  # of many trainings in one launch
    with pytest.MonkeyPatch.context() as patch:
        # One process imports the frameworks, and the ranks are its forks.
        patch.setattr(
            fork_server, "_current", framework_servers.pop() if framework_servers else None
        )
        preloaded = (*fork_server.PRELOADED, *FRAMEWORKS)
        patch.setattr(fork_server, "PRELOADED", preloaded)
        yield run
        framework_servers.append(fork_server.get_fork_server())
