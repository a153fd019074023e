"""The roll call: every rank says that it is here, before anything waits for it.

    rank r                             store (one round's keys)
      ── my world size ──────────────>  size        first writer wins; another number: error
      ── I am r, this process ───────>  rank/r      a second process with this number: error
      <─ who else is here ────────────  rank/*      a rank that finds all completes the roll
      <─ "all here" or two ranks ─────  complete    the first that finds an error writes
                                                    which two ranks contradict each other

So a contradiction is known to every rank at once, with the same sentence, and a
rank that waits can say for whom. After a moment the lowest rank that is here
says it on the terminal, and every rank tells its launcher, which knows who ended.

A store on a port can be written by any user who reaches it. Values are therefore read as
data of known types, and sentences are made of them here.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from lockstep.errors import PlaceError, RendezvousError
from lockstep.launcher.environment import Place
from lockstep.launcher.rank import tell
from lockstep.launcher.verdict import spoken
from lockstep.messages import escape_control, say

__all__ = ["call"]

HERE = "all here"
LOOK = 0.5  # seconds between two looks at who is missing
NOTE_AFTER = 3.0  # seconds until a rank that waits says so
NOTE_AGAIN = 30.0
LONGEST = 255  # characters of a host's name


@dataclass(frozen=True)
class Identity:
    """Who says that it is here: its numbers, its process id, the name of its host."""

    rank: int
    world_size: int
    process: int
    host: str

    @property
    def words(self) -> str:
        """The process, in words."""
        return f"process {self.process} on {self.host}"


def call(store: Store, place: Place, deadline: float) -> None:
    """Wait until every rank of the world is here; `deadline` is a `time.monotonic()` time.

    Raises PlaceError, on every rank that is here, where two processes have one
    rank's number or ranks disagree about the world's size; RendezvousError, with
    the missing ranks, when the deadline passes, and where somebody else has written
    into the store.
    """
    try:
        _enter(store, place)
        _wait(store, place, deadline)
    except (DistError, RuntimeError) as error:
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(
            f"rank {place.rank}: the place where the ranks meet ({place.meeting}) is gone: rank 0 "
            f"or the launcher that served it ended"
        ) from error


def _enter(store: Store, place: Place) -> None:
    host = escape_control(socket.gethostname())[:LONGEST]
    own = Identity(place.rank, place.world_size, os.getpid(), host)
    first = _claim(store, place, "size", own)
    if first.world_size != place.world_size:
        _refuse(store, place, first, own)
    holder = _claim(store, place, f"rank/{place.rank}", own)
    if holder != own:
        _refuse(store, place, holder, own)
    if store.check([f"rank/{rank}" for rank in range(place.world_size)]):
        store.compare_set("complete", "", HERE)


def _claim(store: Store, place: Place, key: str, own: Identity) -> Identity:
    """Write who this is under a key, and return who was there first."""
    value = store.compare_set(key, "", json.dumps(asdict(own)))
    try:
        return _identity(json.loads(value))
    except (ValueError, RecursionError):
        _blame_intruder(place, key)


def _refuse(store: Store, place: Place, first: Identity, second: Identity) -> NoReturn:
    pair = json.dumps([asdict(first), asdict(second)])
    written: bytes = store.compare_set("complete", "", pair)
    _raise_contradiction(place, pair.encode() if written == HERE.encode() else written)


def _raise_contradiction(place: Place, value: bytes) -> NoReturn:
    """Raise PlaceError with what contradicts itself, which some rank wrote."""
    try:
        first, second = map(_identity, json.loads(value))
    except (ValueError, TypeError, RecursionError):
        _blame_intruder(place, "complete")
    if first.world_size == second.world_size:
        raise PlaceError(
            f"two processes say that they are rank {second.rank}: {first.words} and "
            f"{second.words}; give each its own RANK (--node-rank for each host)"
        )
    raise PlaceError(
        f"rank {first.rank} ({first.words}) says that the world has {first.world_size} ranks, "
        f"rank {second.rank} ({second.words}) says {second.world_size}: start every rank with the "
        f"same WORLD_SIZE (--nnodes times --nproc-per-node)"
    )


def _identity(value: Any) -> Identity:
    """Return the identity that plain data describes; ValueError where it describes none."""
    names = {"rank", "world_size", "process", "host"}
    if not isinstance(value, dict) or value.keys() != names:
        raise ValueError
    found = Identity(**value)
    numbers = (found.rank, found.world_size, found.process)
    if not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers):
        raise ValueError
    if not isinstance(found.host, str) or len(found.host) > LONGEST or not found.host.isprintable():
        raise ValueError
    return found


def _blame_intruder(place: Place, key: str) -> NoReturn:
    raise RendezvousError(
        f"rank {place.rank}: the value of {key!r} in the store at {place.meeting} was not written "
        f"by a rank of Lockstep: another program or user writes into this store; use another "
        f"port (MASTER_PORT), or lockstep run, whose store other users of a host cannot reach"
    ) from None


def _wait(store: Store, place: Place, deadline: float) -> None:
    began = time.monotonic()
    note_at = began + NOTE_AFTER
    while not _complete(store, min(LOOK, max(deadline - time.monotonic(), 0.001))):
        missing = _missing(store, place)
        now = time.monotonic()
        if now >= deadline:
            raise RendezvousError(_gave_up(place, missing, now - began))
        tell({"kind": "waiting", "ranks": missing})
        if now >= note_at and missing:
            note_at = now + NOTE_AGAIN
            _note(place, missing, now - began, deadline - now)
    tell({"kind": "waiting", "ranks": []})
    value: bytes = store.get("complete")
    if value != HERE.encode():
        _raise_contradiction(place, value)


def _complete(store: Store, patience: float) -> bool:
    try:
        store.wait(["complete"], timedelta(seconds=patience))
    except RuntimeError:  # the stores of torch have different errors for a deadline
        return bool(store.check(["complete"]))
    return True


def _missing(store: Store, place: Place) -> list[int]:
    return [rank for rank in range(place.world_size) if not store.check([f"rank/{rank}"])]


def _note(place: Place, missing: list[int], waited: float, left: float) -> None:
    """Say for whom the ranks wait, on the lowest rank that is here alone."""
    lowest = next(rank for rank in range(place.world_size) if rank not in missing)
    if place.rank == lowest:
        say(
            f"rank {place.rank} has waited {waited:.0f} s for {spoken(missing)} of "
            f"{place.world_size}, and waits {left:.0f} s more"
        )


def _gave_up(place: Place, missing: list[int], waited: float) -> str:
    if not missing:
        return f"rank {place.rank}: all ranks came, but too late: {waited:.0f} s passed"
    return (
        f"{spoken(missing)} of {place.world_size} did not come within {waited:.0f} s "
        f"(rank {place.rank} waited at {place.meeting}): see whether every host was started with "
        f"the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or give init(timeout=...) more"
    )
