"""The roster: which workers may connect to a driver, and what has become of those that have."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.launcher.environment import RankEnvironment
from lockstep.tools.remote.connection import Connection, RemoteMessage

__all__ = ["Roster", "WorkerHandle"]


@dataclass(eq=False)
class WorkerHandle:
    """The state of one worker in its driver.

    Attributes:
        connection: Its connection to the driver.
        host: The random name of its host.
        index: Its number on that host.
        rank: Its rank, once all workers have connected.
        has_joined: Whether it has joined the world.
        error: The report of the error that kept it from joining.
        connection_lost: The reason why its connection was lost; empty while it exists.
        process_ended: The way in which its process ended; empty while it runs, and on other hosts.
        status: The exit status of its process.
        lost: The way in which the worker ended, from `process_ended`, else `connection_lost`;
            empty while it is usable.
        lost_since: The `time.monotonic()` time at which either of these was first noticed.
    """

    connection: Connection
    host: str
    index: int
    rank: int = -1
    has_joined: bool = False
    error: dict[str, Any] | None = None
    connection_lost: str = ""
    process_ended: str = ""
    status: int | None = None
    lost: str = ""
    lost_since: float = 0.0

    def decide_end(self, now: float, settle: float) -> bool:
        """Set `lost` once connection and process have ended; return whether it was set.

        If only one of them has ended, that is `settle` seconds later.
        """
        if self.lost or not (self.connection_lost or self.process_ended):
            return False
        self.lost_since = self.lost_since or now
        if (self.connection_lost and self.process_ended) or now > self.lost_since + settle:
            self.lost = self.process_ended or self.connection_lost
        return bool(self.lost)

    def variables(self, workers: Sequence[WorkerHandle], **world: Any) -> dict[str, str]:
        """Return the environment with which this worker joins the world of `workers`."""
        sizes = Counter(worker.host for worker in workers)
        hosts = list(sizes)  # in rank order
        environment = RankEnvironment(
            sizes[self.host], nnodes=len(hosts), node_rank=hosts.index(self.host), **world
        )
        return environment.variables(self.index, (self.rank, len(workers)))


class Roster:
    """The workers that may connect, and those that have; safe to use from several threads.

    Attributes:
        hosts: The names of the hosts, this one first. The random names keep out workers of an
            earlier driver with the same key.
        workers: The workers that have connected.
        connections: All connections, also those of refused workers.

    Args:
        nprocs: Number of workers on this host.
        remote: Number of workers that connect from other hosts.
    """

    def __init__(self, nprocs: int, remote: int) -> None:
        self.hosts = [secrets.token_hex(16)]
        self.workers: dict[Connection, WorkerHandle] = {}
        self.connections: list[Connection] = []
        self._wanted = remote
        self._expected = {(self.hosts[0], index) for index in range(nprocs)}
        self._lock = threading.Lock()

    def add_worker(self, connection: Connection, hello: RemoteMessage) -> str:
        """Add a worker; return why it is refused, or an empty string."""
        host = hello["host"]
        index = hello["index"]
        count = hello["workers"]
        with self._lock:
            if host not in self.hosts:
                if count > self._wanted:
                    return f"the driver waits for {self._wanted} more workers, not for {count}"
                self._wanted -= count
                self.hosts.append(host)
                self._expected |= {(host, number) for number in range(count)}
            if (host, index) not in self._expected:
                return f"worker {index} of its host is connected already"
            self._expected.remove((host, index))
            self.workers[connection] = WorkerHandle(connection, host, index)
            return ""

    def assign_ranks(self) -> list[WorkerHandle]:
        """Assign ranks: the driver's host first, then the others in the order of connection."""
        with self._lock:
            workers = sorted(
                self.workers.values(),
                key=lambda worker: (self.hosts.index(worker.host), worker.index),
            )
        for rank, worker in enumerate(workers):
            worker.rank = rank
        return workers
