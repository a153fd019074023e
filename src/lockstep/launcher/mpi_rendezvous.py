"""Ranks that MPI starts: who they are, and the store that torch needs, both from MPI itself.

torch needs a store for the ranks of every backend, and finds it by RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT, which mpiexec does not set. MPI knows the ranks and carries the address:

    ls.init(backend="mpi4py")             find_rank
    dist.init_process_group("mpi4py")     the rendezvous of torch (`env://`), replaced by `register`

On one host the store is private to this user. On several hosts rank 0 serves it at a free port, to
processes that have a secret, which it sends to the others through MPI.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from lockstep.comm.mpi import backend as mpi_backend

if TYPE_CHECKING:
    from lockstep.launcher.environment import RankInfo

__all__ = ["find_rank", "register"]

RETRY = 0.001  # seconds between tests of a broadcast
TRY = 2.0  # seconds for a connection to one of the addresses of rank 0

Rendezvous = Iterator[tuple[Any, int, int]]
Met: TypeAlias = "tuple[RankInfo, Any, bool]"

_met: Met | None = None
_worlds = 0  # process groups of torch that were created from here
_served: list[Any] = []  # what must live until the process ends


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
    if _asked_backend() != mpi_backend.NAME:
        return given(url, **options)
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    global _worlds
    # `init_process_group(rank=, world_size=)` is in the URL, with -1 for what is not given.
    asked = dict(part.split("=") for part in url.partition("?")[2].split("&") if "=" in part)
    names = {"rank": "RANK", "world_size": "WORLD_SIZE"}
    given_ranks = {names[key]: value for key, value in asked.items() if value != "-1"}
    environ = os.environ | given_ranks
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        rank, size = _check_ranks(environ)
        return given(f"env://?rank={rank}&world_size={size}", **options)
    timeout: timedelta = options.get("timeout") or timedelta(minutes=30)
    rank_info, store, _ = find_rank(environ, timeout.total_seconds())
    _worlds += 1  # a world must not find the keys of an earlier one
    world = PrefixStore(f"torch/{_worlds}", store)
    return iter([(world, rank_info.rank, rank_info.world_size)])


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


def find_rank(environ: Mapping[str, str], timeout: float) -> tuple[RankInfo, Any, bool]:
    """Return this rank, a store that all ranks share, and whether the store is private.

    All ranks of MPI_COMM_WORLD make the first call together; later ones return the same.

    Args:
        environ: The environment, whose RANK and WORLD_SIZE must be those of MPI, if they are set.
        timeout: Seconds to wait for the other ranks.

    Raises:
        UsageError: There is no MPI that can be used.
        LaunchEnvironmentError: The environment contradicts MPI.
        RendezvousError: Another rank did not call it, or rank 0 cannot be reached.
    """
    global _met
    _check_ranks(environ)
    if _met is None:
        _met = _meet(timeout)
    return _met


def _check_ranks(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and world size; raise LaunchEnvironmentError if the environment differs."""
    from lockstep.comm.mpi import library as mpi_library

    mpi = mpi_library.load()
    own = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    texts = [environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    rank, size = (
        int(text) if text.isdecimal() else number for text, number in zip(texts, own, strict=True)
    )
    mpi_library.check_ranks(mpi, rank, size)
    return own


def _meet(timeout: float) -> Met:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from lockstep.comm.mpi import library as mpi_library
    from lockstep.launcher.environment import RankInfo
    from lockstep.launcher.local_rendezvous import attach_store, create_store

    mpi = mpi_library.load()
    world, deadline = mpi.COMM_WORLD, time.monotonic() + timeout
    rank, size = world.Get_rank(), world.Get_size()
    if size == 1:
        return RankInfo(), HashStore(), True
    # Later calls do not block for long, because all ranks have come.
    _finish(mpi, world.Ibarrier(), deadline, "another rank")
    host = world.Split_type(mpi.COMM_TYPE_SHARED)
    first = host.bcast(rank)  # the lowest rank of this host
    hosts = sorted(set(world.allgather(first)))
    rank_info = RankInfo(
        rank=rank,
        world_size=size,
        local_rank=host.Get_rank(),
        local_world_size=host.Get_size(),
        host=hosts.index(first),
        launcher="mpiexec",
    )
    host.Free()
    created = create_store() if len(hosts) == 1 and rank == 0 else None
    text = ""
    if rank == 0:
        text = json.dumps(_serve() if created is None else created[1])
    address = json.loads(_broadcast(mpi, text, deadline))
    if isinstance(address, list):
        return _connect(rank_info, address, deadline)
    store = attach_store(address)
    if store is None:
        raise _error(
            rank,
            f"the store of rank 0 cannot be opened ({address}): the ranks of one host must belong "
            "to one user and share /proc",
        )
    return rank_info, store, True


def _serve() -> list[Any]:
    """Serve a store; return its secret, its port and the addresses of this host."""
    import secrets  # here: torch imports this module

    from lockstep.launcher.listening_socket import listen
    from lockstep.launcher.network_interface import find_own_addresses
    from lockstep.launcher.store_server import StoreServer
    from lockstep.transport.secret import SECRET_SIZE

    secret = secrets.token_bytes(SECRET_SIZE)
    # On every interface, because MPI does not say over which one the other hosts connect.
    has_ipv6 = socket.has_dualstack_ipv6()
    server = StoreServer(listen("::" if has_ipv6 else "0.0.0.0", 0), secret)
    _served.append(server)
    addresses = [address for address in find_own_addresses() if has_ipv6 or ":" not in address]
    routed = [address for address in addresses if not address.startswith(("127.", "::1", "fe80:"))]
    return [secret.hex(), server.port, *routed]


def _connect(rank_info: RankInfo, served: list[Any], deadline: float) -> Met:
    """Connect to the store that rank 0 serves, at the first of its addresses that answers."""
    import dataclasses

    from lockstep.kernel.errors import LockstepError
    from lockstep.launcher.secret_store import SecretStore

    secret, port, *addresses = served
    if rank_info.rank == 0:
        addresses = ["localhost", *addresses]
    for address in addresses:
        left = max(1.0, deadline - time.monotonic())
        try:
            store = SecretStore(
                address, port, bytes.fromhex(secret), left, connect_timeout=min(TRY, left)
            )
        except (LockstepError, OSError):  # nobody, or a stranger
            continue
        _served.append(store)
        where = {"master_addr": address, "master_port": port}
        return dataclasses.replace(rank_info, **where), store, False
    raise _error(
        rank_info.rank,
        f"rank 0 cannot be reached at {', '.join(addresses)} (port {port}): open the ports between "
        "the hosts, or set MASTER_ADDR and MASTER_PORT to an address and a port that are open",
    )


def _broadcast(mpi: Any, text: str, deadline: float) -> str:
    """Return the text of rank 0, of any length."""
    size = bytearray(len(text.encode()).to_bytes(8))
    _finish(mpi, mpi.COMM_WORLD.Ibcast([size, mpi.BYTE], 0), deadline, "rank 0")
    buffer = bytearray(text.encode().ljust(int.from_bytes(size)))
    _finish(mpi, mpi.COMM_WORLD.Ibcast([buffer, mpi.BYTE], 0), deadline, "rank 0")
    return buffer.decode()


def _finish(mpi: Any, request: Any, deadline: float, who: str) -> None:
    while not request.Test():
        if time.monotonic() > deadline:
            rank = mpi.COMM_WORLD.Get_rank()
            raise _error(rank, f"{who} did not create its first group in time")
        time.sleep(RETRY)


def _error(rank: int, reason: str) -> Exception:
    from lockstep.kernel.errors import RendezvousError

    return RendezvousError(f"rank {rank}: {reason}")
