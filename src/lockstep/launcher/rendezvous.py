"""Where the ranks meet: the store that one process has and all others reach.

    launcher                    whose store                   where
    lockstep run, one host      the launcher's, private       LOCKSTEP_STORE
    lockstep run, torchrun      the launcher's                MASTER_ADDR:MASTER_PORT
    srun, mpiexec, by hand      rank 0's                      MASTER_ADDR:MASTER_PORT
    srun, mpiexec on one host   rank 0's, private             written to a meeting file
    python, alone               nobody's                      in this process

A private store (`launcher/private_store.py`) cannot be reached by other users; where there cannot
be one, a port of the loopback interface takes its place. A process keeps its store to the
end: it may leave a world and join another one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from datetime import timedelta

import psutil
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from lockstep.errors import RendezvousError
from lockstep.launcher import private_store, rollcall
from lockstep.launcher.environment import Place
from lockstep.launcher.meeting import bind, resolve
from lockstep.launcher.meeting_file import MeetingFile
from lockstep.messages import say

__all__ = ["interface", "leave", "meet"]

LOOPBACK = "127.0.0.1"
FAREWELL = 5.0  # seconds that the rank that serves waits at exit for the others
RETRY = 0.1


class Served:
    """What this process keeps between worlds: its store, and how many worlds it joined.

    `is_private`: every rank holds the store itself, so none needs another one's process.
    """

    store: Store | None = None
    is_private = False
    place: Place | None = None
    worlds = 0


def meet(place: Place, timeout: float) -> Store:
    """Find the other ranks and return the store of this round, for `torch.distributed`.

    Raises PlaceError where the ranks contradict each other, UsageError for an
    address that names no host or a port in use, RendezvousError at the deadline.
    """
    if place.world_size == 1 and place.master_addr is None:
        return HashStore()
    deadline = time.monotonic() + timeout
    Served.worlds += 1
    if Served.store is None or Served.place != place:
        Served.store, Served.place = _open(place, deadline), place
    store = PrefixStore(f"lockstep/{Served.worlds}", Served.store)
    store.set_timeout(timedelta(seconds=timeout))
    try:
        rollcall.call(store, place, deadline)
    finally:
        if place.master_addr is None and place.rank == 0:
            MeetingFile(place.rank).remove()
    return store


def leave() -> None:
    """Say goodbye at exit; the rank that serves the store waits for the others to do so."""
    store, place = Served.store, Served.place
    if store is None or place is None or Served.is_private or not _farewell_needed(place):
        return
    with contextlib.suppress(DistError, RuntimeError):
        here = store.add("lockstep/left", 1)
        deadline = time.monotonic() + FAREWELL
        failed = getattr(sys, "last_value", None) is not None
        while place.rank == 0 and not failed and here < place.world_size:
            if time.monotonic() > deadline:
                return
            time.sleep(RETRY / 10)
            here = store.add("lockstep/left", 0)


def _farewell_needed(place: Place) -> bool:
    if place.launcher == "lockstep":
        return not place.one_host
    return not _launcher_serves()


def _launcher_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open(place: Place, deadline: float) -> Store:
    Served.is_private = False
    if place.store is not None and (found := _attach(place.store)):
        return found
    if place.master_addr is None or place.master_port is None:
        return _through_file(place, deadline)
    resolve(place.master_addr)
    if place.rank == 0 and not _launcher_serves():
        return _serve(bind(place.master_addr, place.master_port), deadline)
    return _reach(place, place.master_addr, place.master_port, deadline)


def _attach(address: str) -> Store | None:
    store = private_store.attach(address)
    Served.is_private = store is not None
    return store


def _serve(listening: socket.socket, deadline: float) -> Store:
    port = int(listening.getsockname()[1])
    return TCPStore(
        LOOPBACK,
        port,
        None,
        True,
        _left(deadline),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _reach(place: Place, address: str, port: int, deadline: float) -> Store:
    """Connect, as soon as somebody answers; say so when that takes long."""
    began, noted = time.monotonic(), False
    while reason := _refusal(address, port, deadline):
        waited = time.monotonic() - began
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"rank {place.rank}: nobody answered at {address}:{port} (MASTER_ADDR, "
                f"MASTER_PORT) within {waited:.0f} s: {reason}; see whether rank 0 was started "
                f"there, and whether a firewall is between"
            )
        if waited >= rollcall.NOTE_AFTER and not noted:
            noted = True
            say(
                f"rank {place.rank}: nobody answers at {address}:{port} (MASTER_ADDR, "
                f"MASTER_PORT) since {waited:.0f} s: {reason}; waiting "
                f"{deadline - time.monotonic():.0f} s more"
            )
        time.sleep(RETRY)
    try:
        return TCPStore(address, port, None, False, _left(deadline), wait_for_workers=False)
    except (DistError, RuntimeError) as error:
        raise RendezvousError(
            f"rank {place.rank}: what answers at {address}:{port} (MASTER_ADDR, MASTER_PORT) is "
            f"no store of torch: another program uses the port"
        ) from error


def _refusal(address: str, port: int, deadline: float) -> str:
    """Return why nobody answers; empty where somebody does."""
    patience = min(5.0, max(0.1, deadline - time.monotonic()))
    try:
        socket.create_connection((address, port), timeout=patience).close()
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def _through_file(place: Place, deadline: float) -> Store:
    """Meet on one host: rank 0 writes where, and the others look for it."""
    meeting = MeetingFile(place.rank)
    if place.rank == 0:
        return _announce(meeting, deadline)
    began, noted = time.monotonic(), False
    while (store := _find(meeting, place, deadline)) is None:
        waited = time.monotonic() - began
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"rank {place.rank}: rank 0 did not come within {waited:.0f} s; see whether it was "
                f"started on this host by the same {place.launcher}"
            )
        if waited >= rollcall.NOTE_AFTER and not noted:
            noted = True
            say(f"rank {place.rank} has waited {waited:.0f} s for rank 0, and goes on")
        time.sleep(RETRY)
    return store


def _announce(meeting: MeetingFile, deadline: float) -> Store:
    created = private_store.create()
    if created is not None and (store := _attach(created[1])):
        meeting.write(created[1])
        return store
    listening = bind(LOOPBACK, 0)
    meeting.write(str(listening.getsockname()[1]))
    return _serve(listening, deadline)


def _find(meeting: MeetingFile, place: Place, deadline: float) -> Store | None:
    text = meeting.read()
    if text is None:
        return None
    if text.isdecimal():
        return _reach(place, LOOPBACK, int(text), deadline)
    return _attach(text)


def interface(place: Place) -> str | None:
    """Return the network interface for this host's part in the world; None if unknown.

    The loopback interface where the ranks meet there; otherwise the one by which
    the master is reached: what a host's own name resolves to is often another.
    """
    address = LOOPBACK if place.loopback else str(place.master_addr)
    with contextlib.suppress(OSError):
        family, number = resolve(address)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((number, place.master_port or 1))  # sends nothing
            own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address == own for entry in addresses):
                return name
    return None
