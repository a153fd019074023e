"""The backend "mpi4py" of `torch.distributed`: its name, and the groups of it.

torch itself refuses the name "mpi" before it asks a registered backend. As for the backend
"lockstep", torch calls `register` when it is imported: that must load nothing and raise nothing.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

NAME = "mpi4py"
MAX_GROUP_TAG = 32_767  # the least upper bound of tags that MPI guarantees
RETRY = 0.01  # seconds between looks at the store

__all__ = ["NAME", "check_ranks", "create", "register"]


def register() -> None:
    """Register the backend "mpi4py" for CPU tensors; may be called repeatedly."""
    import torch.distributed as dist  # here: torch may be about to import this module

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def check_ranks(rank: int, world_size: int) -> None:
    """Load MPI, and check that it gives this process the same rank."""
    from lockstep.comm.mpi import library

    library.check_ranks(library.load(), rank, world_size)


def create(options: Any, _given: Any = None) -> Any:
    """Create the process group of this rank; called by torch for every new group."""
    import torch.distributed as dist

    from lockstep.comm.mpi import library
    from lockstep.comm.mpi.exit import end_together
    from lockstep.comm.mpi.exited_ranks import exited_ranks
    from lockstep.comm.mpi.process_group import MpiProcessGroup

    mpi = library.load()
    world = dist.group.WORLD
    if world is None:
        library.check_ranks(mpi, options.group_rank, options.group_size)
        exited_ranks.watch(options.store)
        end_together(mpi)
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    timeout = options.timeout.total_seconds()
    _wait_for_members(options.store, options.group_rank, ranks, options.group_id, timeout)
    # Only the members make this call, and all of them have arrived, so it does not block.
    everybody = mpi.COMM_WORLD.Get_group()
    members = everybody.Incl(ranks)
    tag = zlib.crc32(options.group_id.encode()) % MAX_GROUP_TAG
    comm = mpi.COMM_WORLD.Create_group(members, tag)
    members.Free()
    everybody.Free()
    return MpiProcessGroup(mpi, comm, options.store, ranks, timeout)


def _wait_for_members(
    store: Any, rank: int, ranks: Sequence[int], name: str, timeout: float
) -> None:
    """Wait until every member creates the group, because MPI would wait without a limit."""
    deadline = time.monotonic() + timeout
    store.set(f"member/{rank}", "")
    if store.add("members", 1) == len(ranks):
        store.set("complete", "")
    while not store.check(["complete"]):
        if time.monotonic() > deadline:
            from lockstep.formatting import format_numbered

            missing = [r for n, r in enumerate(ranks) if not store.check([f"member/{n}"])]
            raise RuntimeError(
                f"rank {ranks[rank]}: {format_numbered('rank', missing)} did not create group "
                f"{name} within {timeout:g} s"
            )
        time.sleep(RETRY if len(ranks) > 1 else 0)
