"""Rendezvous: the store that one process serves and all ranks of a world reach.

    launched by                 who serves the store          its address
    lockstep run, one host      the launcher, private         LOCKSTEP_STORE
    lockstep run, torchrun      the launcher                  MASTER_ADDR:MASTER_PORT
    manually                    rank 0                        MASTER_ADDR:MASTER_PORT
    any other launcher          rank 0                        the same, or derived from its
                                                              variables (`environment.py`)
    python, alone               none needed                   -

Private stores (`private_store.py`) cannot be reached by other users. A process keeps its store
until it exits, because it may leave a world and join another one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from typing import Literal, NamedTuple

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from lockstep.comm.hosts.identity import is_loopback
from lockstep.comm.transport.secret import SECRET, SECRET_FILE
from lockstep.kernel.errors import RendezvousError
from lockstep.launcher.environment import (
    ELASTIC,
    RankInfo,
    is_elastic_on_hosts,
    read_rank_info,
)
from lockstep.launcher.late_ranks import LongWait, is_speaker
from lockstep.launcher.listening_socket import (
    LOOPBACK,
    find_obstacle,
    get_connectable_address,
    listen,
    resolve_address,
    warn_of_strangers,
)
from lockstep.launcher.network_interface import find_interface
from lockstep.launcher.private_store import attach_store
from lockstep.launcher.rank_process import get_exit_code
from lockstep.launcher.rendezvous_check import check_ranks, place_rank, read_hosts
from lockstep.messages import log

__all__ = [
    "choose_interface",
    "find_place",
    "leave_store",
    "open_common_store",
    "wait_for_ranks",
]

LEAVE_TIMEOUT = 5.0  # seconds that the rank that serves the store waits at exit for the others
FAILED_TIMEOUT = 1.0  # seconds that a failed rank takes to announce that it leaves
CONNECT_TIMEOUT = 5.0  # seconds for a connection
GREET_TIMEOUT = 3.0  # seconds for the answer to a greeting
RETRY = 0.1  # seconds between two attempts

# The first bytes from the client of a TCPStore: validate, a magic number, ping, a number that the
# store returns. They are sent before the client is created: it prints a hundred lines of C++
# frames if another program answers, and waits beyond its timeout if a program does not answer.
PING_NUMBER = b"\x01\x02\x03\x04"
GREETING = struct.pack("=BIB", 0, 0x3C85F7CE, 13) + PING_NUMBER
FOREIGN = "a program that is not the store of this run listens there: choose another port"


class NoAnswer(NamedTuple):
    """Why no store answers at an address: what was observed, and the same in words."""

    code: Literal["foreign", "refused", "unreachable"]
    reason: str


class ProcessState:
    """The state that a process keeps between worlds: its store, and the number of worlds joined.

    `is_private` means that every rank holds the store itself and needs no process that serves it.
    """

    store: Store | None = None
    is_private = False
    rank_info: RankInfo | None = None
    worlds = 0


def wait_for_ranks(rank_info: RankInfo, timeout: float) -> Store:
    """Wait until every rank has come, and return the store of this world for torch.

    Args:
        rank_info: This rank, and the address of the store.
        timeout: Seconds to wait for the other ranks.

    Raises:
        LaunchEnvironmentError: The ranks contradict each other.
        UsageError: The address does not resolve, or the port is in use.
        RendezvousError: The timeout expired.
    """
    if rank_info.world_size == 1 and rank_info.master_addr is None:
        return HashStore()
    deadline = time.monotonic() + timeout
    # A prefix for each world: keys of an earlier world must not be taken for keys of this one
    # (torchrun's restarts fail because of that in 3 of 8 trials).
    ProcessState.worlds += 1
    if ProcessState.store is None or ProcessState.rank_info != rank_info:
        ProcessState.store = _open_store(rank_info, deadline)
        ProcessState.rank_info = rank_info
    # Processes that replace others count worlds anew.
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    world = f"{ProcessState.worlds}" if count == "0" else f"{count}/{ProcessState.worlds}"
    store = PrefixStore(f"lockstep/{world}", ProcessState.store)
    store.set_timeout(timedelta(seconds=timeout))
    check_ranks(store, rank_info, deadline)
    return store


def find_place(store: Store, rank_info: RankInfo) -> RankInfo:
    """Return `rank_info` with what the environment does not say about the hosts of the ranks.

    Args:
        store: What `wait_for_ranks` returned.
        rank_info: This rank.

    Raises:
        RendezvousError: Another program has written into the store.
    """
    return place_rank(rank_info, read_hosts(store, rank_info))


def choose_interface(rank_info: RankInfo, store: Store | None) -> str | None:
    """Return the network interface for `store`'s world: see `find_interface`."""
    is_one_host = ProcessState.is_private or rank_info.is_launched_on_one_host
    if is_elastic_on_hosts(os.environ):  # the hosts that it has now are not all that it may have
        is_one_host = False
    elif not is_one_host and store is not None and rank_info.master_addr is not None:
        is_one_host = len(set(read_hosts(store, rank_info))) == 1
    return find_interface(LOOPBACK if is_one_host else rank_info.master_addr or LOOPBACK)


def open_common_store(timeout: float) -> Store:
    """Return the store that the ranks of several hosts share, without a prefix.

    Args:
        timeout: Seconds to wait for the process that serves it.

    Raises:
        RendezvousError: It does not answer.
    """
    if ProcessState.store is None:
        rank_info = read_rank_info(os.environ)
        ProcessState.rank_info = rank_info
        ProcessState.store = _open_store(rank_info, time.monotonic() + timeout)
    return ProcessState.store


def leave_store() -> None:
    """Announce at exit that this rank has left; the rank that serves waits for the others."""
    store = ProcessState.store
    rank_info = ProcessState.rank_info
    if store is None or rank_info is None or ProcessState.is_private:
        return
    if not _may_close_early(rank_info):
        return
    # In a thread: over a connection that was cut, the store would answer after minutes.
    has_failed = getattr(sys, "last_value", None) is not None or get_exit_code() not in (None, 0)
    arguments = store, rank_info, has_failed
    leaving = threading.Thread(target=_announce_leaving, args=arguments, daemon=True)
    leaving.start()
    leaving.join(FAILED_TIMEOUT if has_failed else LEAVE_TIMEOUT + 1)


def _announce_leaving(store: Store, rank_info: RankInfo, has_failed: bool) -> None:
    with contextlib.suppress(DistError, RuntimeError):
        left = store.add("lockstep/left", 1)
        deadline = time.monotonic() + LEAVE_TIMEOUT
        while rank_info.rank == 0 and not has_failed and left < rank_info.world_size:
            if time.monotonic() > deadline:
                return
            time.sleep(RETRY / 10)
            left = store.add("lockstep/left", 0)


def _may_close_early(rank_info: RankInfo) -> bool:
    """Return whether the store ends with rank 0 or its launcher, while other ranks use it."""
    if not _launcher_serves():
        return True
    # In an elastic run, the launcher that serves it waits for the ranks of all hosts.
    return rank_info.launcher == "lockstep" and ELASTIC not in os.environ


def _launcher_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_store(rank_info: RankInfo, deadline: float) -> Store:
    store = None if rank_info.store is None else attach_store(rank_info.store)
    ProcessState.is_private = store is not None
    if store is not None:
        return store
    address = rank_info.master_addr
    port = rank_info.master_port
    assert address is not None, "a world of several ranks has an address"
    assert port is not None, "a world of several ranks has a port"
    resolve_address(address)
    if not rank_info.is_single_host and not is_elastic_on_hosts(os.environ):
        _refuse_secret(rank_info)
    if rank_info.rank == 0 and not _launcher_serves():
        warn_of_strangers(address, port)
        return _serve(listen(address, port, is_single_host=rank_info.is_single_host), deadline)
    return _connect(rank_info, address, port, deadline)


def _refuse_secret(rank_info: RankInfo) -> None:
    for name in (SECRET, SECRET_FILE):
        if name in os.environ:
            raise RendezvousError(
                f"rank {rank_info.rank}: {name} is set, but the store of the ranks admits everyone "
                f"who reaches it: unset the variable, and use a private network (only the "
                f"launchers of an elastic run on several hosts, --min and --max, have a secret)"
            )


def _serve(listening: socket.socket, deadline: float) -> Store:
    if reason := find_obstacle(listening):
        raise RendezvousError(f"rank 0 cannot serve the ranks' store: {reason}")
    port = int(listening.getsockname()[1])
    # TCPStore would listen on every interface, regardless of its host argument. It gets a socket
    # that is already bound instead.
    return TCPStore(
        get_connectable_address(listening),
        port,
        None,
        True,
        _time_left(deadline),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _connect(rank_info: RankInfo, address: str, port: int, deadline: float) -> Store:
    """Connect as soon as the store answers; print notes if that takes long."""
    wait = LongWait(deadline - time.monotonic())
    where = f"rank {rank_info.rank}: no answer from {address}:{port} (MASTER_ADDR, MASTER_PORT)"
    while (failure := _try_address(address, port, deadline)) is not None:
        reason = failure.reason
        advice = _advise(rank_info, address, failure)
        if wait.left <= 0:
            raise RendezvousError(f"{where} within {wait.waited:.0f} s: {reason}{advice}")
        if is_speaker(rank_info) and wait.is_note_due():
            log(
                f"{where} for {wait.waited:.0f} s (since {wait.start}): {reason}; waiting "
                f"{wait.left:.0f} s more{advice}"
            )
        time.sleep(RETRY)
    try:
        return TCPStore(address, port, None, False, _time_left(deadline), wait_for_workers=False)
    except (DistError, RuntimeError) as error:
        raise RendezvousError(f"{where}: {FOREIGN}") from error


def _advise(rank_info: RankInfo, address: str, failure: NoAnswer) -> str:
    """Return what to check if the store does not answer."""
    if failure.code == "foreign":
        return " with --master-port (MASTER_PORT) on every host"
    numeric = resolve_address(address)[1]
    if rank_info.is_single_host or failure.code != "refused" or not is_loopback(numeric):
        return "; check that rank 0 was started there and that no firewall is in between"
    resolved = "" if numeric == address else f"{numeric}, "
    return (
        f"; on this host {address} is {resolved}the loopback interface, which leads to no other "
        f"host: set --master-addr (MASTER_ADDR) to an address of rank 0's host in your network"
        + ("" if is_loopback(address) else ", or correct /etc/hosts")
    )


def _try_address(address: str, port: int, deadline: float) -> NoAnswer | None:
    """Return why no TCPStore answers at an address; None if one does."""
    timeout = min(CONNECT_TIMEOUT, max(0.1, deadline - time.monotonic()))
    try:
        with socket.create_connection((address, port), timeout=timeout) as connection:
            is_store = _greet(connection, min(timeout, GREET_TIMEOUT))
            return None if is_store else NoAnswer("foreign", FOREIGN)
    except TimeoutError:
        return NoAnswer("unreachable", "timed out")
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise RendezvousError(
                "this process cannot connect to the other ranks: it has too many open files; "
                "raise the limit (ulimit -n)"
            ) from None
        return NoAnswer(
            "refused" if isinstance(error, ConnectionRefusedError) else "unreachable",
            (error.strerror or str(error)).lower(),
        )


def _greet(connection: socket.socket, timeout: float) -> bool:
    """Return whether the store of a run answers."""
    connection.settimeout(timeout)
    answer = b""
    with contextlib.suppress(OSError):
        connection.sendall(GREETING)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(len(PING_NUMBER))
    return answer == PING_NUMBER


def _time_left(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))
