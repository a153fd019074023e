"""Which ranks share a host, for launchers that do not say so.

mpiexec gives no index of the host, and variables set by hand often only RANK and WORLD_SIZE. Each
rank registers with the identity of its host (`rendezvous_check.py`); the rank that completes the
registration numbers the hosts in order of their lowest ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from lockstep.comm.hosts.identity import identify_host
from lockstep.launcher.environment import RankInfo

__all__ = ["get_host_identity", "number_hosts", "place_rank"]


def get_host_identity() -> str:
    """Return a short text that processes have in common if they can share memory.

    It is a hash: everyone who reaches the store can read it.
    """
    return hashlib.blake2b(identify_host().encode(), digest_size=8).hexdigest()


def number_hosts(identities: Sequence[str]) -> list[int]:
    """Return the index of each rank's host; hosts count from 0 in order of their lowest ranks.

    Args:
        identities: The identity of each rank's host, in rank order.
    """
    numbers: dict[str, int] = {}
    return [numbers.setdefault(identity, len(numbers)) for identity in identities]


def place_rank(rank_info: RankInfo, hosts: Sequence[int]) -> RankInfo:
    """Return `rank_info` with the values that its environment does not give.

    Args:
        rank_info: This rank.
        hosts: The index of each rank's host, in rank order.
    """
    here, unknown = hosts[rank_info.rank], rank_info.unknown
    local_rank, local_world_size = hosts[: rank_info.rank].count(here), hosts.count(here)
    return replace(
        rank_info,
        local_rank=local_rank if "local_rank" in unknown else rank_info.local_rank,
        local_world_size=(
            local_world_size if "local_world_size" in unknown else rank_info.local_world_size
        ),
        host=here if "host" in unknown else rank_info.host,
        unknown=(),
    )
