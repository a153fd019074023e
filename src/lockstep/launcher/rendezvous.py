"""Rendezvous: the store that one process serves and all ranks of a world reach.

    launched by                 who serves the store          its address
    lockstep run, one host      the launcher, private         LOCKSTEP_STORE
    lockstep run, torchrun      the launcher                  MASTER_ADDR:MASTER_PORT
    manually                    rank 0                        MASTER_ADDR:MASTER_PORT
    any other launcher          rank 0                        the same, or derived from its
                                                              variables (`master_address.py`)
    srun, mpiexec on one host   rank 0, private               in a rendezvous file
    python, alone               none needed                   -

Private stores and rendezvous files (`local_rendezvous.py`) cannot be reached by other users.
If the system has no private stores, a port of the loopback interface is used instead. A
process keeps its store until it exits, because it may leave a world and join another one.
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
from typing import ClassVar

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from lockstep.comm.hosts.identity import is_loopback
from lockstep.comm.transport.handshake import Refused, Status
from lockstep.comm.transport.message_connection import requires_secret
from lockstep.comm.transport.secret import SECRET, SECRET_FILE, read_secret, warn_without_secret
from lockstep.kernel.errors import LockstepError, RendezvousError
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
)
from lockstep.launcher.local_rendezvous import RendezvousFile, attach_store, create_store
from lockstep.launcher.network_interface import find_interface, find_master_interface
from lockstep.launcher.rank_process import get_exit_code
from lockstep.launcher.rendezvous_check import check_ranks, place_rank, read_layout
from lockstep.launcher.secret_store import SecretStore
from lockstep.launcher.store_server import StoreServer
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
ATTEMPT = 2.0  # seconds to connect to a store with a secret, before a note is due
GREET_TIMEOUT = 3.0  # seconds for the answer to a greeting
RETRY = 0.1  # seconds between two attempts

# The first bytes from the client of a TCPStore: validate, a magic number, ping, a number that the
# store returns. They are sent before the client is created: it prints a hundred lines of C++
# frames if another program answers, and waits beyond its timeout if a program does not answer.
PING_NUMBER = b"\x01\x02\x03\x04"
FOREIGN = "another program answers"
CLOSED = "a program closes connections there at once"
NEEDS_SECRET = "the store requires a secret"
NO_SECRET = "the store has no secret"
OTHER_SECRET = "the store has another secret"
REFUSED = os.strerror(errno.ECONNREFUSED).lower()
SILENT = "a program accepts connections there and does not answer"
GREETING = struct.pack("=BIB", 0, 0x3C85F7CE, 13) + PING_NUMBER


class ProcessState:
    """The state that a process keeps between worlds: its store, and the number of worlds joined.

    `is_private` means that every rank holds the store itself and needs no process that serves it.
    `server` is the store's server if rank 0 serves it to processes that have the run's secret.
    """

    store: Store | None = None
    is_private = False
    has_secret = False
    server: StoreServer | None = None
    kept: ClassVar[list[Store]] = []  # torch's groups keep no reference to a Python store
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
        ProcessState.store, ProcessState.rank_info = _open_store(rank_info, deadline), rank_info
    # Processes that replace others count worlds anew.
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    world = f"{ProcessState.worlds}" if count == "0" else f"{count}/{ProcessState.worlds}"
    store = PrefixStore(f"lockstep/{world}", ProcessState.store)
    store.set_timeout(timedelta(seconds=timeout))
    try:
        check_ranks(store, rank_info, deadline)
    finally:
        if rank_info.master_addr is None and rank_info.rank == 0:
            RendezvousFile(rank_info.rank).remove()
    return store


def find_place(store: Store, rank_info: RankInfo) -> RankInfo:
    """Return `rank_info` with what the environment does not say about the hosts of the ranks.

    Args:
        store: What `wait_for_ranks` returned.
        rank_info: This rank.

    Raises:
        RendezvousError: Another program has written into the store.
    """
    return place_rank(rank_info, read_layout(store, rank_info)[0])


def choose_interface(rank_info: RankInfo, store: Store | None) -> str | None:
    """Return the network interface for `store`'s world: see `find_interface`."""
    if is_elastic_on_hosts(os.environ):  # the hosts that it has now are not all that it may have
        return find_master_interface(str(rank_info.master_addr))
    is_one_host = ProcessState.is_private or rank_info.is_launched_on_one_host
    if is_one_host or store is None or rank_info.master_addr is None:
        return find_interface(rank_info)
    return find_interface(rank_info, read_layout(store, rank_info)[1])


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
    store, rank_info = ProcessState.store, ProcessState.rank_info
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
    if rank_info.launcher == "lockstep":
        # In an elastic run, the launcher that serves it waits for the ranks of all hosts.
        return not rank_info.is_single_host and ELASTIC not in os.environ
    return ProcessState.has_secret or not _launcher_serves()


def _launcher_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_store(rank_info: RankInfo, deadline: float) -> Store:
    ProcessState.is_private = False
    if rank_info.store is not None and (store := _attach(rank_info.store)):
        return store
    if rank_info.master_addr is None or rank_info.master_port is None:
        return _open_local_store(rank_info, deadline)
    resolve_address(rank_info.master_addr)
    address, port = rank_info.master_addr, rank_info.master_port
    # A launch on one host ignores the secret of the environment, unless it is an elastic run whose
    # other hosts are lost.
    is_local = rank_info.is_launched_on_one_host and not is_elastic_on_hosts(os.environ)
    secret = read_secret({} if is_local else os.environ)
    ProcessState.has_secret = secret is not None
    if secret is not None:
        return _open_secret_store(rank_info, address, port, secret, deadline)
    is_served = _launcher_serves()
    if rank_info.rank == 0 and not is_served:
        if not is_loopback(address):
            log(warn_without_secret(address, port))
        return _serve(listen(address, port, is_single_host=rank_info.is_single_host), deadline)
    return _connect(rank_info, address, port, deadline)


def _open_secret_store(
    rank_info: RankInfo, address: str, port: int, secret: bytes, deadline: float
) -> Store:
    """Open the store that admits only processes with the run's secret.

    `lockstep run` or rank 0 serves it at the master's address.
    """
    if rank_info.launcher != "lockstep":
        if _launcher_serves():
            raise RendezvousError(
                f"rank {rank_info.rank}: this run has a secret, and the store of torchrun at "
                f"{address}:{port} admits everyone: start it with lockstep run on each host, or "
                f"unset {SECRET} and {SECRET_FILE}"
            )
        if rank_info.rank == 0:
            listening = listen(address, port, is_single_host=False)
            ProcessState.server = StoreServer(listening, secret, log)
    store = _connect(rank_info, address, port, deadline, secret)
    ProcessState.kept.append(store)
    return store


def _attach(address: str) -> Store | None:
    store = attach_store(address)
    ProcessState.is_private = store is not None
    return store


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


def _connect(
    rank_info: RankInfo, address: str, port: int, deadline: float, secret: bytes | None = None
) -> Store:
    """Connect as soon as the store answers; print notes if that takes long."""
    wait = LongWait(deadline - time.monotonic())
    while True:
        store = _attempt(rank_info, address, port, deadline, secret)
        if not isinstance(store, str):
            return store
        advice = _advise(rank_info, address, store)
        if wait.left <= 0:
            raise RendezvousError(
                f"rank {rank_info.rank}: no answer from {address}:{port} (MASTER_ADDR, "
                f"MASTER_PORT) within {wait.waited:.0f} s: {store}; {advice}"
            )
        if is_speaker(rank_info) and wait.is_note_due():
            log(
                f"rank {rank_info.rank}: no answer from {address}:{port} (MASTER_ADDR, "
                f"MASTER_PORT) for {wait.waited:.0f} s (since {wait.start}): {store}; waiting "
                f"{wait.left:.0f} s more; {advice}"
            )
        time.sleep(RETRY)


def _attempt(
    rank_info: RankInfo, address: str, port: int, deadline: float, secret: bytes | None
) -> Store | str:
    """Return the store at an address, or why it cannot be reached yet.

    Raises:
        RendezvousError: Another program answers, or only one end has a secret, or another one.
    """
    where = f"rank {rank_info.rank}: the store at {address}:{port} (MASTER_ADDR, MASTER_PORT)"
    if secret is not None:
        store = _try_with_secret(address, port, secret, deadline)
        if store == NO_SECRET:
            raise RendezvousError(
                f"{where} has no secret, but this host has one: start the host that serves the "
                f"store (rank 0's) with the same --secret-file ({SECRET_FILE})"
            )
        if store == OTHER_SECRET:
            raise RendezvousError(
                f"{where} has another secret than this host: give every host the same "
                f"--secret-file ({SECRET_FILE})"
            )
        return store
    reason = _try_connect(address, port, deadline)
    if reason == FOREIGN:
        raise RendezvousError(_describe_foreign_program(rank_info, address, port))
    if reason == NEEDS_SECRET:
        raise RendezvousError(
            f"{where} requires a secret: copy the file that --secret-file names on its host to "
            f"this host, and give it with --secret-file ({SECRET_FILE})"
        )
    if reason:
        return reason
    try:
        return TCPStore(address, port, None, False, _time_left(deadline), wait_for_workers=False)
    except (DistError, RuntimeError) as error:
        raise RendezvousError(_describe_foreign_program(rank_info, address, port)) from error


def _advise(rank_info: RankInfo, address: str, reason: str) -> str:
    """Return what to check if the store does not answer."""
    numeric = resolve_address(address)[1]
    if rank_info.is_single_host or reason != REFUSED or not is_loopback(numeric):
        return "check that rank 0 was started there and that no firewall is in between"
    resolved = "" if numeric == address else f"{numeric}, "
    return (
        f"on this host {address} is {resolved}the loopback interface, which leads to no other "
        f"host: set --master-addr (MASTER_ADDR) to an address of rank 0's host in your network"
        + ("" if is_loopback(address) else ", or correct /etc/hosts")
    )


def _describe_foreign_program(rank_info: RankInfo, address: str, port: int) -> str:
    return (
        f"rank {rank_info.rank}: {address}:{port} (MASTER_ADDR, MASTER_PORT) is used by a program "
        f"that is not a launcher or rank 0 of this run: choose another port with --master-port "
        f"(MASTER_PORT) on every host"
    )


def _try_with_secret(address: str, port: int, secret: bytes, deadline: float) -> Store | str:
    """Return the store, or why it cannot be reached: NO_SECRET, OTHER_SECRET or a reason."""
    left = _time_left(deadline).total_seconds()
    try:
        return SecretStore(address, port, secret, left, connect_timeout=min(ATTEMPT, left))
    except LockstepError as error:
        if isinstance(error.__cause__, Refused):
            is_other = error.__cause__.status is Status.OTHER_KEY
            return OTHER_SECRET if is_other else str(error.__cause__)
        if _try_connect(address, port, deadline) == "":
            return NO_SECRET
        return str(error.__cause__ or error)


def _try_connect(address: str, port: int, deadline: float) -> str:
    """Return why a connection fails: FOREIGN for another program; "" if it succeeds."""
    timeout = min(5.0, max(0.1, deadline - time.monotonic()))
    try:
        with socket.create_connection((address, port), timeout=timeout) as connection:
            reason = _greet(connection, min(timeout, GREET_TIMEOUT))
        if reason == CLOSED:
            return NEEDS_SECRET if requires_secret(address, port, timeout) else ""
        return reason
    except TimeoutError:
        return "timed out"
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise RendezvousError(
                "this process cannot connect to the other ranks: it has too many open files; "
                "raise the limit (ulimit -n)"
            ) from None
        return (error.strerror or str(error)).lower()


def _greet(connection: socket.socket, timeout: float) -> str:
    """Return FOREIGN if the answer to the greeting is text, SILENT if there is none, else "".

    Binary data may come from a TCPStore of another torch version. CLOSED, too, or from a store
    that requires a secret.
    """
    connection.settimeout(timeout)
    try:
        connection.sendall(GREETING)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(len(PING_NUMBER))
    except TimeoutError:
        return SILENT
    except OSError:
        return CLOSED
    if not answer:
        return CLOSED
    is_text = all(0x20 <= byte < 0x7F for byte in answer)
    return FOREIGN if is_text else ""


def _time_left(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def _open_local_store(rank_info: RankInfo, deadline: float) -> Store:
    """Open the store on one host: rank 0 publishes its address, the others wait for that."""
    file = RendezvousFile(rank_info.rank)
    if rank_info.rank == 0:
        return _publish_store(file, deadline)
    wait, own = LongWait(deadline - time.monotonic()), f"rank {rank_info.rank}"
    while (store := _find_store(file, rank_info, deadline)) is None:
        if wait.left <= 0:
            raise RendezvousError(
                f"{own}: rank 0 did not join within {wait.waited:.0f} s; check "
                f"that it was started on this host by the same {rank_info.launcher}"
            )
        if is_speaker(rank_info) and wait.is_note_due():
            log(wait.describe(own, "rank 0"))
        time.sleep(RETRY)
    return store


def _publish_store(file: RendezvousFile, deadline: float) -> Store:
    created = create_store()
    if created is not None and (store := _attach(created[1])):
        file.write(created[1])
        return store
    listening = listen(LOOPBACK, 0)
    file.write(str(listening.getsockname()[1]))
    return _serve(listening, deadline)


def _find_store(file: RendezvousFile, rank_info: RankInfo, deadline: float) -> Store | None:
    text = file.read()
    if text is None:
        return None
    if text.isdecimal():
        return _connect(rank_info, LOOPBACK, int(text), deadline)
    return _attach(text)
