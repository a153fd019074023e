"""Gloo's connections: opened, and closed.

A wait that times out closes all of Gloo's connections of this process. Gloo has no other way to
wake its waiting threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d

from lockstep.foreign_messages import is_gloo_timeout

__all__ = ["close_connections", "connect", "connect_on_host"]

# torch's types leave out what its own `new_group` uses.
ProcessGroupGloo: Any = getattr(_distributed_c10d, "ProcessGroupGloo", None)
"""None if torch was built without Gloo."""

LOOPBACK = "127.0.0.1"

CLOSING_TAG = (1 << 31) - 1  # of a message that nobody sends


def connect(
    store: Any, rank: int, size: int, timeout: timedelta, devices: Sequence[Any] = ()
) -> Any:
    """Connect this rank to all others; return the `ProcessGroupGloo`.

    Args:
        store: The store in which the ranks meet.
        rank: This rank.
        size: The number of ranks.
        timeout: The time for the connections, and for each call.
        devices: Gloo's devices, such as `ProcessGroupGloo.create_device(...)`; none for the one
            of the host's name.
    """
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    # Not lazily: a lazy connection that is closed makes the next message wait for 100 s.
    options._devices = list(devices) or [ProcessGroupGloo.create_default_device(lazy_init=False)]
    return ProcessGroupGloo(store, rank, size, options)


def connect_on_host(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect the ranks of one host over its loopback interface; see `connect`.

    Raises:
        RuntimeError: The ranks could not be connected, or torch was built without Gloo.
    """
    if ProcessGroupGloo is None:
        raise RuntimeError("this torch was built without Gloo")
    device = ProcessGroupGloo.create_device(hostname=LOOPBACK, lazy_init=False)
    return connect(store, rank, size, timeout, [device])


def close_connections(gloo: Any) -> None:
    """Close all connections of a `ProcessGroupGloo`, which cannot be used any longer.

    Threads that wait, here and on the other ranks, wake up. Safe on any thread.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    for other in range(gloo.size()):
        if other != gloo.rank():
            try:
                gloo.recv([nothing], other, CLOSING_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if is_gloo_timeout(str(error)):
                    return  # it has closed all; a connection that is closed already raises, too
