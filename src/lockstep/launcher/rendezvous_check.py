"""The rendezvous check: every rank registers in the store before any rank waits for another.

    rank r                             keys of one world in the store
      ── my world size ──────────────>  size        the first rank writes it; others must agree
      ── I am r, process p of host h ─>  rank/r      a second process with this rank: error
      <─ who has registered ──────────  rank/*      the rank that finds all of them completes it
      <─ the host of each rank ───────  hosts       before that it writes who shares a host
      <─ all here, or two ranks ──────  complete    a rank that finds an error writes the two
                                                    ranks that contradict each other

So on a contradiction every rank raises the same message at once, and a rank that waits can name
the missing ranks. After a few seconds the lowest rank that has registered prints them; every
rank reports them to its launcher, which knows which ranks have exited.

Every user who can reach the port of a store can write to it. Values are therefore validated, and
error messages are composed from them here.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from lockstep.errors import LaunchEnvironmentError, RendezvousError
from lockstep.formatting import format_numbered
from lockstep.launcher.environment import RankInfo
from lockstep.launcher.listening_socket import is_loopback
from lockstep.launcher.placement import get_host_identity, number_hosts
from lockstep.launcher.rank_process import report_to_launcher
from lockstep.messages import escape_control, say

__all__ = ["check_ranks", "read_hosts"]

ALL_HERE = "all here"
CHECK_INTERVAL = 0.5  # seconds between two checks for missing ranks
MIN_POLL, MAX_POLL = 0.001, 0.05  # seconds between two checks for completion
NOTE_AFTER = 3.0  # seconds until a waiting rank prints a note
NOTE_INTERVAL = 30.0  # seconds between two notes
MAX_HOST_NAME = 255  # characters


@dataclass(frozen=True)
class Registration:
    """The entry in the store that a rank writes about itself.

    Attributes:
        rank: Its rank.
        world_size: The number of ranks, according to this rank.
        process: Its process id.
        host: The name of its host.
        identity: What ranks have in common that share a host.
    """

    rank: int
    world_size: int
    process: int
    host: str
    identity: str

    def __str__(self) -> str:
        """Return "process 7 on HOST"."""
        return f"process {self.process} on {self.host}"


def check_ranks(store: Store, rank_info: RankInfo, deadline: float) -> None:
    """Wait until every rank of the world has registered.

    Args:
        store: The store, with a prefix for this world.
        rank_info: This rank.
        deadline: A `time.monotonic()` time.

    Raises:
        LaunchEnvironmentError: On every rank that has registered, if two processes have the
            same rank or ranks disagree about the world size.
        RendezvousError: The deadline passed (the message names the missing ranks), or
            another program has written into the store.
    """
    try:
        _register(store, rank_info)
        _wait(store, rank_info, deadline)
    except (DistError, RuntimeError) as error:
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(
            f"rank {rank_info.rank}: the ranks' store ({rank_info.store_location}) is gone: rank "
            f"0 or the launcher that served it has exited"
        ) from error


def _register(store: Store, rank_info: RankInfo) -> None:
    host = escape_control(socket.gethostname())[:MAX_HOST_NAME]
    own = Registration(rank_info.rank, rank_info.world_size, os.getpid(), host, get_host_identity())
    first = _claim(store, rank_info, "size", own)
    if first.world_size != rank_info.world_size:
        _report_contradiction(store, rank_info, first, own)
    holder = _claim(store, rank_info, f"rank/{rank_info.rank}", own)
    if holder != own:
        _report_contradiction(store, rank_info, holder, own)
    if store.check([f"rank/{rank}" for rank in range(rank_info.world_size)]):
        if rank_info.master_addr is not None and rank_info.store is None:
            _write_hosts(store, rank_info)
        store.compare_set("complete", "", ALL_HERE)


def _write_hosts(store: Store, rank_info: RankInfo) -> None:
    """Write the index of each rank's host."""
    registrations = [
        _read_registration(rank_info, f"rank/{rank}", store.get(f"rank/{rank}"))
        for rank in range(rank_info.world_size)
    ]
    store.set("hosts", json.dumps(number_hosts([each.identity for each in registrations])))


def read_hosts(store: Store, rank_info: RankInfo) -> list[int]:
    """Return the index of each rank's host, after `check_ranks`.

    Raises:
        RendezvousError: Another program has written into the store.
    """
    try:
        hosts: Any = json.loads(store.get("hosts"))
    except (ValueError, RecursionError):
        hosts = None
    numbers = range(rank_info.world_size)
    is_list = isinstance(hosts, list) and len(hosts) == rank_info.world_size
    if not is_list or not all(type(host) is int and host in numbers for host in hosts):
        _raise_foreign_value(rank_info, "hosts")
    return list(hosts)


def _claim(store: Store, rank_info: RankInfo, key: str, own: Registration) -> Registration:
    """Write `own` under a key unless it is taken; return the registration that is there."""
    value = store.compare_set(key, "", json.dumps(asdict(own)))
    return _read_registration(rank_info, key, value)


def _read_registration(rank_info: RankInfo, key: str, value: bytes) -> Registration:
    try:
        return _parse_registration(json.loads(value))
    except (ValueError, RecursionError):
        _raise_foreign_value(rank_info, key)


def _report_contradiction(
    store: Store, rank_info: RankInfo, first: Registration, second: Registration
) -> NoReturn:
    pair = json.dumps([asdict(first), asdict(second)])
    written: bytes = store.compare_set("complete", "", pair)
    value = pair.encode() if written == ALL_HERE.encode() else written
    _raise_contradiction(rank_info, value)


def _raise_contradiction(rank_info: RankInfo, value: bytes) -> NoReturn:
    """Raise the error for the two registrations that some rank wrote."""
    try:
        first, second = map(_parse_registration, json.loads(value))
    except (ValueError, TypeError, RecursionError):
        _raise_foreign_value(rank_info, "complete")
    if first.world_size == second.world_size:
        raise LaunchEnvironmentError(
            f"two processes are rank {second.rank}: {first} and {second}; give each its own RANK "
            f"(--node-rank for each host)"
        )
    raise LaunchEnvironmentError(
        f"the world has {first.world_size} ranks according to rank {first.rank} ({first}), but "
        f"{second.world_size} according to rank {second.rank} ({second}): start every rank with "
        f"the same WORLD_SIZE (--nnodes times --nproc-per-node)"
    )


def _parse_registration(value: Any) -> Registration:
    """Return the registration that JSON data describes; ValueError if it describes none."""
    names = {"rank", "world_size", "process", "host", "identity"}
    if not isinstance(value, dict) or value.keys() != names:
        raise ValueError
    found = Registration(**value)
    numbers = (found.rank, found.world_size, found.process)
    if not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers):
        raise ValueError
    for text in (found.host, found.identity):
        if not isinstance(text, str) or len(text) > MAX_HOST_NAME or not text.isprintable():
            raise ValueError
    return found


def _raise_foreign_value(rank_info: RankInfo, key: str) -> NoReturn:
    raise RendezvousError(
        f"rank {rank_info.rank}: the value of {key!r} in the store at {rank_info.store_location} "
        f"was not written by a rank of Lockstep: another program or user writes into this store; "
        f"use another port (MASTER_PORT), or lockstep run, whose store other users of a host "
        f"cannot reach"
    ) from None


def _wait(store: Store, rank_info: RankInfo, deadline: float) -> None:
    started = time.monotonic()
    note_at = started + NOTE_AFTER
    while not _is_complete(store, min(CHECK_INTERVAL, max(deadline - time.monotonic(), 0.001))):
        missing = _missing_ranks(store, rank_info)
        now = time.monotonic()
        if now >= deadline:
            raise RendezvousError(_describe_timeout(rank_info, missing, now - started))
        report_to_launcher({"kind": "waiting", "ranks": missing})
        if now >= note_at and missing:
            note_at = now + NOTE_INTERVAL
            _print_note(rank_info, missing, now - started, deadline - now)
    report_to_launcher({"kind": "waiting", "ranks": []})
    value: bytes = store.get("complete")
    if value != ALL_HERE.encode():
        _raise_contradiction(rank_info, value)


def _is_complete(store: Store, timeout: float) -> bool:
    """Wait until all ranks have registered or one reports an error, at most `timeout` seconds.

    It polls, because a TCPStore prints two lines whenever `store.wait` times out.
    """
    began = time.monotonic()
    while not store.check(["complete"]):
        waited = time.monotonic() - began
        if waited >= timeout:
            return False
        time.sleep(min(max(waited / 10, MIN_POLL), MAX_POLL, timeout - waited))
    return True


def _missing_ranks(store: Store, rank_info: RankInfo) -> list[int]:
    return [rank for rank in range(rank_info.world_size) if not store.check([f"rank/{rank}"])]


def _print_note(rank_info: RankInfo, missing: list[int], waited: float, left: float) -> None:
    """Print which ranks are missing; only the lowest rank that has registered does."""
    lowest = next(rank for rank in range(rank_info.world_size) if rank not in missing)
    if rank_info.rank == lowest:
        whom = format_numbered("rank", missing)
        say(
            f"rank {rank_info.rank} has waited {waited:.0f} s for {whom} of "
            f"{rank_info.world_size}, and waits {left:.0f} s more"
        )


def _describe_timeout(rank_info: RankInfo, missing: list[int], waited: float) -> str:
    if not missing:
        return f"rank {rank_info.rank}: all ranks joined, but too late, after {waited:.0f} s"
    who = format_numbered("rank", missing)
    is_local = not rank_info.is_single_host and is_loopback(rank_info.master_addr or "")
    reach = ", which other hosts cannot reach" if is_local else ""
    return (
        f"{who} of {rank_info.world_size} did not join within {waited:.0f} s (rank "
        f"{rank_info.rank} waited at {rank_info.store_location}{reach}): check that every host was "
        "started with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE and with its own RANK "
        "(--node-rank), or increase init(timeout=...)"
    )
