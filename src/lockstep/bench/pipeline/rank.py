"""A rank's side: it trains as it is told, and waits asleep while others are measured.

{"train": {...case}, "checked": 2}   -> {"losses": [...], "digest": "..."} after the first steps,
                                        where they are known
{"block": 5, "alone": false}         -> {"times": [ns, ...]}, [] on a rank that is not measured
{"drop": true}                       -> {}: the training is let go
end of file                          the rank leaves
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from lockstep.bench.lineup import Lineup
from lockstep.bench.pipeline.case import Batch, Case
from lockstep.bench.pipeline.ways import WAYS, Driven, Training, Way, driver
from lockstep.bench.rank import LINEUP, converse
from lockstep.examples.rpc_pipeline import joined

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
        self._sources: list[Batch] = []
        self._batch: Batch = (torch.empty(0), torch.empty(0))

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
        self._sources = [case.batch(number) for number in range(BATCHES)]
        inputs, targets = self._sources[0]
        self._batch = inputs.clone(), targets.clone()
        self._training = self._way.make(case)
        losses = []
        for _ in range(checked):  # on the same batch: another one hardly shows what was learnt
            self._refill(0)
            losses.append(self._training.step(self._batch))
        known = [loss for loss in losses if loss is not None]
        return {"losses": known, "digest": self._training.digest()}

    def _refill(self, turn: int) -> None:
        """Write another batch into the same memory, as a loader would."""
        for target, source in zip(self._batch, self._sources[turn % BATCHES], strict=True):
            target.copy_(source)

    def _block(self, calls: int, alone: bool) -> list[int]:
        """Time `calls` steps; return nanoseconds."""
        served = not self._way.backend and self._rank > 0
        if served or (alone and self._rank > 0):
            return []
        assert self._training is not None
        times, clock, step = [], time.perf_counter_ns, self._training.step
        gc.disable()
        try:
            for turn in range(calls):
                self._refill(turn)
                if self._way.backend and not alone:
                    self._lineup()
                begun = clock()
                step(self._batch)
                times.append(clock() - begun)
        finally:
            gc.enable()
        return times
