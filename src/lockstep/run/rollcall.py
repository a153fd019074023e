"""The roll call: every rank says that it is here, before anything waits for it.

    rank r                             store (one round's keys)
      ── my world size ──────────────>  size        first writer wins; another number: error
      ── I am r, this process ───────>  rank/r      a second process with this number: error
      ── one more is here ───────────>  arrived     the last one completes the roll
      <─ "all here" or a sentence ────  complete    whoever finds an error first writes it

So a contradiction is known to every rank at once, with the same sentence, and a
rank that waits can say for whom. After a moment the lowest rank that is here
says it on the terminal, and every rank tells its launcher, which knows who ended.
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta

from torch.distributed import DistError, DistStoreError, Store  # type: ignore[attr-defined]

from lockstep.errors import PlaceError, RendezvousError
from lockstep.messages import say
from lockstep.run.environment import Place
from lockstep.run.rank import tell
from lockstep.run.verdict import spoken

__all__ = ["call"]

HERE = "all here"
LOOK = 0.5  # seconds between two looks at who is missing
NOTE_AFTER = 3.0  # seconds until a rank that waits says so
NOTE_AGAIN = 30.0


def call(store: Store, place: Place, deadline: float) -> None:
    """Wait until every rank of the world is here; `deadline` is a `time.monotonic()` time.

    Raises PlaceError, on every rank that is here, where two processes have one
    rank's number or ranks disagree about the world's size; RendezvousError, with
    the missing ranks, when the deadline passes.
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
    mine = _identity(place)
    first = json.loads(store.compare_set("size", "", mine))
    if first["world_size"] != place.world_size:
        _refuse(
            store,
            f"{_spoken(first)} says that the world has {first['world_size']} ranks, "
            f"{_spoken(json.loads(mine))} says {place.world_size}: start every rank with the same "
            f"WORLD_SIZE (--nnodes times --nproc-per-node)",
        )
    holder = store.compare_set(f"rank/{place.rank}", "", mine).decode()
    if holder != mine:
        _refuse(
            store,
            f"two processes say that they are rank {place.rank}: {_process(json.loads(holder))} "
            f"and {_process(json.loads(mine))}; give each its own RANK (--node-rank for each host)",
        )
    if store.add("arrived", 1) == place.world_size:
        store.compare_set("complete", "", HERE)


def _refuse(store: Store, sentence: str) -> None:
    written = store.compare_set("complete", "", sentence).decode()
    raise PlaceError(sentence if written == HERE else written)


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
    sentence = store.get("complete").decode()
    if sentence != HERE:
        raise PlaceError(sentence)


def _complete(store: Store, patience: float) -> bool:
    try:
        store.wait(["complete"], timedelta(seconds=patience))
    except DistStoreError:
        return False
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


def _identity(place: Place) -> str:
    return json.dumps(
        {
            "rank": place.rank,
            "world_size": place.world_size,
            "process": os.getpid(),
            "host": socket.gethostname(),
        }
    )


def _process(identity: dict[str, object]) -> str:
    return f"process {identity['process']} on {identity['host']}"


def _spoken(identity: dict[str, object]) -> str:
    return f"rank {identity['rank']} ({_process(identity)})"
