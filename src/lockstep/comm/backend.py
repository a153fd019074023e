"""The backend "lockstep" of `torch.distributed`, loaded when it is first used.

torch calls `register` when it is imported (entry points in pyproject.toml), so that
`dist.init_process_group("lockstep")` works without importing lockstep. Registration must not
break `import torch`: it loads nothing and raises nothing.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from lockstep.comm.native_module import (
    ArgumentError,
    load_native,
    reason_unavailable,
    refusal,
    refuse_calls,
)

__all__ = [
    "ArgumentError",
    "available",
    "host_group_of",
    "load_native",
    "of_group",
    "reason_unavailable",
    "refuse_calls",
    "register",
]

NAME = "lockstep"
"""The name of the backend. Do not use "cpu:lockstep": torch 2.13 then has no default backend, and
its DistributedDataParallel does not ask the backend for the memory of its buckets. torch also
confuses two custom backends in one group."""

MAX_LOCAL_RANKS = 64  # of one group in shared memory: kMaxRanks in csrc/core/layout.h

_worlds = 0  # how many default groups the store of the current one has had before it

_forked_from: int | None = None
"""The parent process, if this one was forked while torch.distributed was initialized."""


def register() -> None:
    """Register the backend "lockstep"; may be called repeatedly.

    It carries CPU tensors. Those on CUDA devices are passed on to Gloo, as Gloo's own groups do.
    """
    try:
        import torch.distributed as dist

        if not dist.is_available() or NAME in dist.Backend.backend_list:
            return
        os.register_at_fork(after_in_child=_note_fork)
        # `devices` is a list, because torch would iterate over the letters of a string.
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
    except Exception:  # an error here would break `import torch`
        return


def available() -> bool:
    """Return whether the backend is available."""
    return reason_unavailable() is None


def of_group(group: Any | None) -> Any | None:
    """Return the native backend of a process group, or None if it has another backend."""
    backend = _find_backend(group)
    is_native = backend is not None and isinstance(backend, load_native().LockstepBackend)
    return backend if is_native else None


def host_group_of(group: Any | None) -> Any | None:
    """Return the `HostGroup` of a process group whose ranks are on several hosts, or None."""
    return getattr(_find_backend(group), "host_group", None)


def _find_backend(group: Any | None) -> Any | None:
    """Return the backend of a process group for CPU tensors; None without the native module."""
    if not available():
        return None
    import torch
    import torch.distributed as dist

    # torch's stubs leave open that there is no default group, which raises AttributeError here.
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


def _note_fork() -> None:
    global _forked_from
    dist = sys.modules["torch.distributed"]
    _forked_from = os.getppid() if dist.is_initialized() else None


def _check_not_forked() -> None:
    """Raise RuntimeError in a forked process whose parent is a rank.

    A new group would use the store of the parent, and the other ranks would mistake this process
    for it.
    """
    import torch.distributed as dist

    if _forked_from is not None and dist.is_initialized():
        raise RuntimeError(
            f"rank {dist.get_rank()}: process {os.getpid()} is a fork of process {_forked_from}, "
            "where torch.distributed was initialized, and cannot create process groups: create "
            f"them in process {_forked_from}, or start the new process by spawning it"
        )


def _create(options: Any, _given: Any = None) -> Any:
    """Create the backend of this rank for a process group; called by torch."""
    _check_not_forked()
    if refused := refusal():
        raise ArgumentError(
            f"rank {options.group_rank}: creating group {options.group_id} is refused: {refused}"
        )
    reason = reason_unavailable()
    if reason is not None:
        raise RuntimeError(f"the backend 'lockstep' is unavailable (use 'gloo' instead); {reason}")
    from lockstep.comm.hosts.identity import find_hosts  # here: `import torch` imports this module

    ranks = list(options.global_ranks_in_group)
    store = _open_store(options, ranks)
    hosts = find_hosts(store, options.group_rank, options.group_size, options.timeout)
    hosts = _limit_hosts(hosts or [("", "localhost")] * options.group_size)
    if len({identity for identity, _ in hosts}) > 1:
        from lockstep.comm.hosts.process_group import create_across_hosts

        return create_across_hosts(
            store, options.group_rank, hosts, options.timeout, options.group_id, ranks
        )
    return load_native().create(
        store=store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout,
        name=options.group_id,
        ranks=ranks,
    )


def _limit_hosts(hosts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the hosts of the ranks; ranks that a group in shared memory can't hold get others.

    Args:
        hosts: The identity and the name of the host of each rank.
    """
    ranks_on: dict[str, int] = {}
    limited = []
    for identity, name in hosts:
        part = ranks_on.get(identity, 0) // MAX_LOCAL_RANKS
        ranks_on[identity] = ranks_on.get(identity, 0) + 1
        limited.append((f"{identity} {part}", name) if part else (identity, name))
    return limited


def _open_store(options: Any, ranks: list[int]) -> Any:
    """Return the store in which the ranks of a new group meet.

    torch numbers groups by the calls of `new_group`: if these differ between ranks, groups of one
    name have different ranks. They never meet, and those that come later raise an error.
    """
    global _worlds
    import torch.distributed as dist

    store = options.store
    if not ranks:
        _worlds = (store.add("lockstep/worlds", 1) - 1) // options.group_size
    if len(ranks) < 2:
        return store
    # Only a default group of this backend counts the worlds that have used this store.
    is_counted = dist.get_backend() == NAME
    world = _worlds if is_counted else 0
    own = first = ", ".join(map(str, ranks))
    if is_counted:
        first = store.compare_set(f"lockstep/ranks/{world}", "", own).decode()
    store = dist.PrefixStore(f"lockstep/{world}/{first}/", store)  # type: ignore[attr-defined]
    if first == own:
        return store
    reason = (
        f"rank {ranks[options.group_rank]} makes group {options.group_id} of ranks {own}, another "
        f"rank of ranks {first}: call new_group on every rank in the same order with the same "
        "ranks, also where the rank is not in the group, or pass use_local_synchronization=True"
    )
    store.set("lockstep/refused/0", reason)
    store.set("lockstep/address/0", "")
    raise ArgumentError(reason)
