"""Every case of the contract on one rank, in any kind of launch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import lockstep as ls
from contract import (
    aliases,
    forms,
    grouping,
    layout,
    lists,
    messages,
    movement,
    plain,
    reduction,
    rounding,
    sparse,
)
from contract.check import Ledger
from contract.limits import GUARANTEE_TREE, LIMITS, SMALL_PIECES, THRESHOLDS
from lockstep.comm.hosts.identity import IDENTITY
from lockstep.comm.shared_memory import empty_shared

SIZES = (0, 1, 3, 16, 65, 1023, 4097, 65_537)  # elements; with each threshold's neighbours
FEW_PIECES = 9_001  # elements of the largest message where pieces are small
PATIENCE = 30.0  # seconds for one operation

GROUPS: dict[str, Callable[..., None]] = {
    "all_reduce": reduction.all_reduce,
    "reduce": reduction.reduce,
    "reduce_scatter": reduction.reduce_scatter,
    "broadcast": movement.broadcast,
    "all_gather": movement.all_gather,
    "gather": movement.gather,
    "scatter": movement.scatter,
    "all_to_all": movement.all_to_all,
    "barrier": movement.barrier,
    "sparse": sparse.sparse,
    "lists": lists.lists,
    "messages": messages.messages,
    "groups": grouping.groups,
    "threads": grouping.threads,
    "asynchronous": forms.asynchronous,
    "objects": forms.objects,
    "coalesced": forms.coalesced,
    "aliases": aliases.aliases,
    "programs": forms.programs,
    "layouts": layout.layouts,
    "rounding": rounding.rounding,
}


# The host of each rank, for the backend across hosts, whose operations are those of Gloo.
PLACEMENTS = {"ab": 2, "aba": 3, "aabb": 4}


def sizes(backend: str) -> tuple[int, ...]:
    """Return the sizes in float32 elements, those around the backend's thresholds included."""
    around = {bytes_ // 4 + step for bytes_ in THRESHOLDS.get(backend, ()) for step in (-1, 0, 1)}
    most = FEW_PIECES if "-" in backend else SIZES[-1]
    return tuple(sorted({min(size, most) for size in (*SIZES, *around)}))


def noted(place: int, case: str) -> None:
    """Write down which case is running, into an open file."""
    os.ftruncate(place, os.pwrite(place, case.encode(), 0))


def run_all(variant: str, folder: str) -> dict[str, Any]:
    """Run every case on this rank; say in `folder` which one is running."""
    backend, _, route = variant.partition("-")
    is_on_hosts = route in PLACEMENTS
    if is_on_hosts:
        os.environ[IDENTITY] = route[int(os.environ["RANK"])]
    os.environ.update(SMALL_PIECES if route and not is_on_hosts else {})
    ls.init(backend=backend, timeout=PATIENCE)
    if route == "shared" or (route == "mixed" and ls.rank() % 2):
        plain.lie_in(lambda shape, dtype: empty_shared(*shape, dtype=dtype))
    place = os.open(Path(folder) / f"rank-{ls.rank()}", os.O_WRONLY | os.O_CREAT)
    note = functools.partial(noted, place)
    limits = LIMITS["gloo" if is_on_hosts else backend]
    ledger = Ledger(backend, limits, note, small=bool(route) and not is_on_hosts)
    for name, group in GROUPS.items():
        ledger.prefix = name
        has_tree = backend in GUARANTEE_TREE and not is_on_hosts
        more = {"guarantees_tree": has_tree} if name == "rounding" else {}
        group(ledger, sizes(variant), **more)
    digest = rounding.digest()
    dist.barrier()
    ls.shutdown()
    os.close(place)
    return {"results": ledger.results, "skipped": ledger.skipped,
            "confirmed": ledger.confirmed, "digest": digest}  # fmt: skip
