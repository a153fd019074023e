"""The worker handle: one worker of the pool as the driver sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.launcher.environment import RankEnvironment
from lockstep.remote.link import Link

__all__ = ["WorkerHandle", "places"]


@dataclass(eq=False)
class WorkerHandle:
    """Worker `index` of host number `host` (0: the driver's own), reached by others at `place`.

    `report` is the error with which it could not join. `cut` says why its link
    ended and `ended` how its process did, `how` what is told of it in the end.
    `waits` counts in how many looks in a row it was in a collective.
    """

    link: Link
    host: int
    index: int
    place: tuple[str, int]
    rank: int = -1
    joined: bool = False
    report: dict[str, Any] | None = None
    cut: str = ""
    ended: str = ""
    status: int | None = None
    how: str = ""
    noticed: float = 0.0
    waits: int = 0

    def variables(
        self, handles: Sequence[WorkerHandle], address: str, port: int, run: str, store: str
    ) -> dict[str, str]:
        """Return the environment by which this worker joins the world of `handles`."""
        sizes = Counter(handle.host for handle in handles)
        hosts = list(sizes)  # in rank order
        assignment = RankEnvironment(
            sizes[self.host], address, port, run, len(hosts), hosts.index(self.host), store=store
        )
        rank, world_size = str(self.rank), str(len(handles))
        return assignment.variables(self.index) | {
            "RANK": rank,
            "ROLE_RANK": rank,
            "WORLD_SIZE": world_size,
            "ROLE_WORLD_SIZE": world_size,
        }


def places(handles: Iterable[WorkerHandle]) -> list[WorkerHandle]:
    """Number the workers: this host's first, then host by host as they came."""
    ordered = sorted(handles, key=lambda handle: (handle.host, handle.index))
    for rank, handle in enumerate(ordered):
        handle.rank = rank
    return ordered
