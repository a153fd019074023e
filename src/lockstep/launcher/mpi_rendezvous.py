"""`dist.init_process_group("mpi4py")` without variables: MPI knows the ranks, and connects them.

torch needs a store for the ranks of every backend, and finds it by RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT, which mpiexec does not set. A rendezvous of torch does not learn which backend it
is for, so it is read from the caller; other backends see no difference. On one host the store is
private to this user, on several hosts rank 0 serves it at a free port.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

from lockstep.comm import mpi_backend

__all__ = ["connect", "register"]

RETRY = 0.001  # seconds between tests of a broadcast
TRY = 2.0  # seconds for a connection to one of the addresses of rank 0
ADDRESS_BYTES = 4096

Rendezvous = Iterator[tuple[Any, int, int]]


def register() -> None:
    """Register the backend "mpi4py" and its rendezvous; torch calls this when it is imported.

    It loads nothing and raises nothing; it may be called repeatedly.
    """
    try:
        mpi_backend.register()
        from torch.distributed.rendezvous import _rendezvous_handlers as handlers

        given = handlers["env"]
        if getattr(given, "func", None) is not _rendezvous:
            handlers["env"] = functools.partial(_rendezvous, given)
    except Exception:  # an error here would break `import torch`
        return


def _rendezvous(given: Callable[..., Rendezvous], url: str, **options: Any) -> Rendezvous:
    """Return the store, the rank and the world size for `env://`; called by torch.

    Args:
        given: torch's own function, for other backends and for ranks with an address.
        url: The URL, such as "env://?rank=0&world_size=2".
        options: The timeout.
    """
    has_address = bool(os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"))
    if has_address or _asked_backend() != mpi_backend.NAME:
        return given(url, **options)
    from lockstep.comm import mpi_library

    mpi = mpi_library.load()
    world = mpi.COMM_WORLD
    # `init_process_group(rank=, world_size=)` and RANK and WORLD_SIZE must not say otherwise.
    asked = dict(part.split("=") for part in url.partition("?")[2].split("&") if "=" in part)
    numbers = {
        "rank": int(asked.get("rank", world.Get_rank())),
        "world_size": int(asked.get("world_size", world.Get_size())),
    }
    size = numbers["world_size"] if numbers["world_size"] > 0 else world.Get_size()
    mpi_library.check_ranks(mpi, numbers["rank"], size)
    timeout: timedelta = options.get("timeout") or timedelta(minutes=30)
    store = connect(mpi, timeout.total_seconds())
    return iter([(store, world.Get_rank(), world.Get_size())])


def _asked_backend() -> str | None:
    """Return the backend that the calling `init_process_group` was asked for, if any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "init_process_group" and module == (
            "torch.distributed.distributed_c10d"
        ):
            backend = frame.f_locals.get("backend")
            return None if backend is None else str(backend)
        frame = frame.f_back
    return None


def connect(mpi: Any, timeout: float) -> Any:
    """Return a store that the ranks of MPI_COMM_WORLD share; all of them call this.

    Raises:
        RuntimeError: Another rank did not call it, or rank 0 cannot be reached.
    """
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    from lockstep.launcher.local_rendezvous import attach_store, create_store

    world, deadline = mpi.COMM_WORLD, time.monotonic() + timeout
    if world.Get_size() == 1:
        return HashStore()
    rank = world.Get_rank()
    host = world.Split_type(mpi.COMM_TYPE_SHARED)
    is_single_host = host.Get_size() == world.Get_size()
    host.Free()
    address, served = "", None
    if rank == 0:
        created = create_store() if is_single_host else None
        if created is not None:
            address = created[1]
        else:
            served = socket.create_server(("", 0))
            address = json.dumps([served.getsockname()[1], *_own_addresses(is_single_host)])
    address = _broadcast(mpi, address, deadline)
    if not address.startswith("["):
        store = attach_store(address)
        if store is None:
            raise RuntimeError(
                f"rank {rank}: the store of rank 0 cannot be opened ({address}): the ranks of one "
                "host must belong to the same user and share /proc"
            )
        return store
    port, *addresses = json.loads(address)
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    if served is not None:
        return TCPStore(
            "localhost", port, None, True, left, False, master_listen_fd=served.detach()
        )
    return TCPStore(_reachable(rank, addresses, port), port, None, False, left, False)


def _broadcast(mpi: Any, text: str, deadline: float) -> str:
    """Return the text of rank 0."""
    world = mpi.COMM_WORLD
    buffer = bytearray(text.encode().ljust(ADDRESS_BYTES))
    request = world.Ibcast([buffer, mpi.BYTE], 0)
    while not request.Test():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"rank {world.Get_rank()}: rank 0 did not call init_process_group in time"
            )
        time.sleep(RETRY)
    return buffer.decode().rstrip()


def _own_addresses(is_single_host: bool) -> list[str]:
    """Return the numeric addresses at which other hosts may reach this one."""
    if is_single_host:
        return ["127.0.0.1"]
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    found = [a.address for each in psutil.net_if_addrs().values() for a in each
             if a.family in families]  # fmt: skip
    return [each for each in found if not each.startswith(("127.", "::1", "fe80:"))]


def _reachable(rank: int, addresses: list[str], port: int) -> str:
    for address in addresses:
        try:
            socket.create_connection((address, port), TRY).close()
        except OSError:
            continue
        return address
    raise RuntimeError(
        f"rank {rank}: rank 0 cannot be reached at {', '.join(addresses)} (port {port}): set "
        "MASTER_ADDR and MASTER_PORT to an address and a port of its host that are open"
    )
