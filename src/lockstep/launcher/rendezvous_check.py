"""The rendezvous check: every rank registers in the store before any rank waits for another.

    rank r                             keys of one world in the store
      ── my world size ──────────────>  size        the first rank writes it; others must agree
      ── I am r, process p of host h ─>  rank/r      a second process with this rank: error
      ── one more ───────────────────>  registered  the last rank to count finds all of rank/*
      <─ the host of each rank ───────  hosts       before that it writes who shares a host
      <─ all here, or an error ───────  complete    a rank that finds an error writes a sentence:
                                                    which ranks contradict each other, or at the
                                                    timeout which are missing

So on a contradiction, or at the timeout of the first rank, every rank raises the same message at
once. The lowest rank that has registered prints which ranks are missing, every ten seconds. The
ranks of a launcher also report to it which of its ranks are missing, because it knows which have
exited; in an elastic run on several hosts, the first rank of each host reports those of all hosts.

mpiexec gives no index of the host, and variables set by hand often only RANK and WORLD_SIZE. The
identities of the hosts tell which ranks share one; hosts count in order of their lowest ranks.

Every user who can reach the port of a store can write to it. Values are therefore validated, and
sentences are printed without control characters.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, NoReturn

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from lockstep.comm.hosts.identity import identify_host, is_loopback
from lockstep.kernel.errors import LaunchEnvironmentError, RendezvousError
from lockstep.launcher.environment import RankInfo, is_elastic_on_hosts
from lockstep.launcher.late_ranks import LongWait, advise_on_late_ranks, describe_ranks
from lockstep.launcher.rank_process import report_to_launcher
from lockstep.messages import escape_control, log

__all__ = ["check_ranks", "get_host_identity", "number_hosts", "place_rank", "read_hosts"]

ALL_HERE = "all here"
CHECK_INTERVAL = 0.5  # seconds between two checks for missing ranks
# seconds between two checks for completion
MIN_POLL = 0.001
MAX_POLL = 0.05
END_TIMEOUT = 5.0  # seconds that ranks on the host of the store wait for the others to read it
RANKS_PER_CHECK = 128  # with more ranks each checks less often: one store serves all of them
MAX_HOST_NAME = 255  # characters
MAX_ENTRY = 2000  # bytes of what a rank writes
ERRORS = {"contradiction": LaunchEnvironmentError, "timeout": RendezvousError}


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


TYPES = [int, int, int, str, str]  # of the attributes of a Registration


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
        try:
            _register(store, rank_info)
            _wait(store, rank_info, deadline)
        except (LaunchEnvironmentError, RendezvousError):
            with contextlib.suppress(DistError, RuntimeError):
                _wait_for_readers(store, rank_info)
            raise
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
    # Only the last rank asks for all keys: a request of every rank would be as long as the world.
    is_last = store.add("registered", 1) >= rank_info.world_size
    if is_last and store.check([f"rank/{rank}" for rank in range(rank_info.world_size)]):
        _complete(store, rank_info)


def _complete(store: Store, rank_info: RankInfo) -> None:
    """Write which ranks share a host, if they may not know it; then, that all ranks are here."""
    if not rank_info.is_launched_on_one_host:
        keys = [f"rank/{rank}" for rank in range(rank_info.world_size)]
        entries = [_read_registration(rank_info, key, store.get(key)) for key in keys]
        hosts = number_hosts([entry.identity for entry in entries])
        store.set("hosts", json.dumps(hosts))
    store.compare_set("complete", "", ALL_HERE)


def read_hosts(store: Store, rank_info: RankInfo) -> list[int]:
    """Return the index of each rank's host; call it after `check_ranks`.

    Raises:
        RendezvousError: Another program has written into the store.
    """
    numbers = range(rank_info.world_size)
    try:
        hosts: Any = json.loads(store.get("hosts"))
        if [*map(type, hosts)] != [int] * len(numbers) or not set(hosts) <= set(numbers):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        _raise_foreign_value(rank_info, "hosts")
    return list(hosts)


def number_hosts(identities: Sequence[str]) -> list[int]:
    """Return the index of each rank's host, given the identity of that host, in rank order."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(identity, len(numbers)) for identity in identities]


def place_rank(rank_info: RankInfo, hosts: Sequence[int]) -> RankInfo:
    """Return `rank_info` with the values that its environment does not give.

    Args:
        rank_info: This rank.
        hosts: The index of each rank's host, in rank order.
    """
    here = hosts[rank_info.rank]
    values: dict[str, Any] = {
        "local_rank": hosts[: rank_info.rank].count(here),
        "local_world_size": hosts.count(here),
        "host": here,
    }
    return replace(rank_info, unknown=(), **{name: values[name] for name in rank_info.unknown})


def get_host_identity() -> str:
    """Return a short text that processes have in common if they can share memory.

    It is a hash: everyone who reaches the store can read it.
    """
    return hashlib.blake2b(identify_host().encode(), digest_size=8).hexdigest()


def _claim(store: Store, rank_info: RankInfo, key: str, own: Registration) -> Registration:
    """Write `own` under a key unless it is taken; return the registration that is there."""
    value = store.compare_set(key, "", json.dumps(asdict(own)))
    return _read_registration(rank_info, key, value)


def _read_registration(rank_info: RankInfo, key: str, value: bytes) -> Registration:
    try:
        entry = Registration(**json.loads(value))
        contents = astuple(entry)
        if [*map(type, contents)] != TYPES or len(value) > MAX_ENTRY:
            raise ValueError
        if not "".join(map(str, contents)).isprintable():
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        _raise_foreign_value(rank_info, key)
    return entry


def _report_contradiction(
    store: Store, rank_info: RankInfo, first: Registration, second: Registration
) -> NoReturn:
    if first.world_size == second.world_size:
        sentence = (
            f"two processes are rank {second.rank}: {first} and {second}; give each its own RANK "
            f"(--node-rank for each host)"
        )
    else:
        sentence = (
            f"the world has {first.world_size} ranks according to rank {first.rank} ({first}), but "
            f"{second.world_size} according to rank {second.rank} ({second}): start every rank "
            f"with the same WORLD_SIZE (--nnodes times --nproc-per-node)"
        )
    own = json.dumps(["contradiction", sentence])
    written: bytes = store.compare_set("complete", "", own)
    _raise_error(rank_info, own.encode() if written == ALL_HERE.encode() else written)


def _raise_error(rank_info: RankInfo, value: bytes) -> NoReturn:
    """Raise the error that some rank wrote."""
    try:
        kind, sentence = json.loads(value)
        error = ERRORS[kind](escape_control(" ".join(sentence[:MAX_ENTRY].split())))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        _raise_foreign_value(rank_info, "complete")
    raise error


def _raise_foreign_value(rank_info: RankInfo, key: str) -> NoReturn:
    raise RendezvousError(
        f"rank {rank_info.rank}: the value of {key!r} in the store at {rank_info.store_location} "
        f"was not written by a rank of Lockstep: another program or user writes into this store; "
        f"use another port (MASTER_PORT), or lockstep run, whose store other users of a host "
        f"cannot reach"
    ) from None


def _wait(store: Store, rank_info: RankInfo, deadline: float) -> None:
    wait = LongWait(deadline - time.monotonic())
    interval = CHECK_INTERVAL * max(1.0, rank_info.world_size / RANKS_PER_CHECK)
    reported: Sequence[int] = _ranks_of_launcher(rank_info)
    while not _is_complete(store, min(interval, max(wait.left, 0.001))):
        if wait.left <= 0:
            _end_at_timeout(store, rank_info, wait.waited)
            break
        reported = _list_missing(store, reported)
        report_to_launcher({"kind": "waiting", "ranks": reported})
        if wait.is_note_due() and _is_lowest(store, rank_info):
            missing = _list_missing(store, range(rank_info.world_size))
            if missing:
                what = describe_ranks(missing, rank_info)
                advice = advise_on_late_ranks(missing, rank_info)
                log(f"{wait.describe(f'rank {rank_info.rank}', what)}; {advice}")
    report_to_launcher({"kind": "waiting", "ranks": []})
    value: bytes = store.get("complete")
    if value != ALL_HERE.encode():
        _raise_error(rank_info, value)


def _end_at_timeout(store: Store, rank_info: RankInfo, waited: float) -> None:
    """Let every rank that waits raise the same error."""
    missing = _list_missing(store, range(rank_info.world_size))
    if not missing:
        _complete(store, rank_info)  # the last rank came at this moment
        return
    sentence = _describe_timeout(rank_info, missing, waited)
    store.compare_set("complete", "", json.dumps(["timeout", sentence]))


def _wait_for_readers(store: Store, rank_info: RankInfo) -> None:
    """On the host of the store, wait until the ranks of other hosts know the error.

    The store ends with this process, or with its launcher.
    """
    store.add("ended", 1)
    if rank_info.is_single_host or rank_info.host != 0 or "host" in rank_info.unknown:
        return
    deadline = time.monotonic() + END_TIMEOUT
    missing = _list_missing(store, range(rank_info.world_size))
    while store.add("ended", 0) < rank_info.world_size - len(missing):
        if time.monotonic() > deadline:
            return
        time.sleep(MAX_POLL)


def _ranks_of_launcher(rank_info: RankInfo) -> range:
    """Return the ranks to report to `lockstep run` as missing: those that it can lose."""
    if rank_info.launcher != "lockstep":
        return range(0)
    if is_elastic_on_hosts(os.environ) and rank_info.local_rank == 0:
        return range(rank_info.world_size)  # host 0's launcher replaces those of a lost host
    first = rank_info.rank - rank_info.local_rank
    return range(first, first + rank_info.local_world_size)


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


def _list_missing(store: Store, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if not store.check([f"rank/{rank}"])]


def _is_lowest(store: Store, rank_info: RankInfo) -> bool:
    """Return whether no lower rank has registered."""
    return not any(store.check([f"rank/{rank}"]) for rank in range(rank_info.rank))


def _describe_timeout(rank_info: RankInfo, missing: list[int], waited: float) -> str:
    is_local = not rank_info.is_single_host and is_loopback(rank_info.master_addr or "")
    reach = ", which other hosts cannot reach" if is_local else ""
    return (
        f"{describe_ranks(missing, rank_info)} did not join within {waited:.0f} s, while the "
        f"others waited at {rank_info.store_location}{reach}; "
        f"{advise_on_late_ranks(missing, rank_info)}"
    )
