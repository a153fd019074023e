"""Which variables each rank is given: torchrun's, so that any script knows them.

    host 0, 2 ranks                 host 1, 2 ranks
    LOCAL_RANK  0        1          0        1
    RANK        0        1          2        3         = GROUP_RANK * LOCAL_WORLD_SIZE + LOCAL_RANK

TORCHELASTIC_USE_AGENT_STORE tells torch that the launcher serves the store, so
that no rank binds a port that another program may have taken meanwhile.
LOCKSTEP_STORE leads `lockstep.init()` past that store to one that other users cannot
reach, where all ranks are on one host.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.launcher.environment import LAUNCHER, STORE

__all__ = ["Assignment"]


@dataclass(frozen=True)
class Assignment:
    """`nprocs` ranks on host number `host` of `hosts`, which meet at `address`:`port`.

    `store` is the address of their private store (`launcher/private_store.py`), if there is one.
    """

    nprocs: int
    address: str
    port: int
    run: str
    hosts: int = 1
    host: int = 0
    role: str = "default"
    store: str = ""

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts."""
        return self.nprocs * self.hosts

    @property
    def first_rank(self) -> int:
        """The rank of this host's local rank 0."""
        return self.nprocs * self.host

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return what is added to the environment of this host's rank `local_rank`."""
        rank, world_size = str(self.first_rank + local_rank), str(self.world_size)
        store = {STORE: f"{self.address} {self.port} {self.store}"} if self.store else {}
        return {
            "RANK": rank,
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.host),
            "ROLE_RANK": rank,
            "ROLE_NAME": self.role,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(self.nprocs),
            "GROUP_WORLD_SIZE": str(self.hosts),
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.run,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            LAUNCHER: self.run,
            **store,
        }
