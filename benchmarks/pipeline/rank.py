"""A rank's side: it trains as it is told, and waits asleep while others are measured.

{"train": {...case}, "checked": 2}   -> {"losses": [...], "digest": "..."} after the first steps,
                                        where they are known
{"block": 5, "alone": false}         -> {"times": [ns, ...]}, [] on a rank that is not measured
{"drop": true}                       -> {}: the training is let go
end of file                          the rank leaves
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from benchmarks.feed import Feed
from benchmarks.pipeline.case import Case
from benchmarks.pipeline.ways import WAYS, Driven, Training, Way, driver
from examples.rpc_pipeline import joined
from lockstep.bench.lineup import Lineup
from lockstep.bench.rank import LINEUP, converse

__all__ = ["main"]

BATCHES = 2  # by turns


def main(name: str, folder: str, peer: str, patience: float) -> None:
    """Join as the way called `name` asks for, and answer until the end."""
    way = WAYS[name]
    rank = lockstep.rank()
    lineup = Lineup(f"{folder}/{LINEUP}{peer}", rank, way.ranks, patience)
    with world(way, f"{folder}/rpc-{peer}", patience):
        stepper = Stepper(way, rank, lineup)
        hello = {"hello": rank, "peer": peer, "library": f"torch {torch.__version__}"}
        converse(stepper.answer, folder, hello)
    lineup.close()


@contextmanager
def world(way: Way, rendezvous: str, patience: float) -> Iterator[None]:
    """Join the world that a way needs, with one thread."""
    if way.make is Driven:
        yield
        driver().close()
        return
    if way.name.startswith("lockstep"):
        lockstep.init(backend=way.backend, timeout=patience, device="cpu")
        yield
        lockstep.shutdown()
        return
    torch.set_num_threads(1)
    if not way.backend:
        with joined(lockstep.rank(), rendezvous, patience):
            yield
        return
    dist.init_process_group(way.backend, timeout=timedelta(seconds=patience))
    yield
    dist.destroy_process_group()


class Stepper:
    """One rank of a way, with the training that it was told to begin."""

    def __init__(self, way: Way, rank: int, lineup: Lineup) -> None:
        self._way, self._rank, self._lineup = way, rank, lineup
        self._training: Training | None = None
        self._feed: Feed | None = None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked."""
        if "train" in asked:
            return self._begin(Case(**asked["train"]), asked["checked"])
        if "block" in asked:
            return {"times": self._block(asked["block"], asked["alone"])}
        self._training = None
        return {}

    def _begin(self, case: Case, checked: int) -> dict[str, Any]:
        self._training = None  # the one before has to go first
        self._feed = Feed([case.batch(number) for number in range(BATCHES)])
        self._training = self._way.make(case)
        losses = []
        for _ in range(checked):  # on the same batch: another one hardly shows what was learnt
            self._feed.refill(0)
            losses.append(self._training.step(self._feed.batch))
        known = [loss for loss in losses if loss is not None]
        return {"losses": known, "digest": self._training.digest()}

    def _block(self, calls: int, alone: bool) -> list[int]:
        """Time `calls` steps; return nanoseconds."""
        served = not self._way.backend and self._rank > 0
        if served or (alone and self._rank > 0):
            return []
        assert self._training is not None
        assert self._feed is not None
        lineup = self._lineup if self._way.backend and not alone else None
        return self._feed.timed(self._training.step, calls, lineup)
