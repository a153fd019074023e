"""A rank's side: it trains on request, and waits asleep while others are measured.

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
from benchmarks.pipeline.contenders import CONTENDERS, Contender, Driven, Training, driver
from benchmarks.rank_processes import START_BARRIER, answer_requests
from examples.rpc_pipeline import joined
from lockstep.tools.bench.start_barrier import StartBarrier

__all__ = ["main"]

BATCHES = 2  # by turns


def main(name: str, folder: str, key: str, timeout: float) -> None:
    """Join as contender `name` asks for, and answer until the end."""
    contender = CONTENDERS[name]
    rank = lockstep.rank()
    start_barrier = StartBarrier(f"{folder}/{START_BARRIER}{key}", rank, contender.ranks, timeout)
    with world(contender, f"{folder}/rpc-{key}", timeout):
        stepper = Stepper(contender, rank, start_barrier)
        hello = {"hello": rank, "runner": key, "library": f"torch {torch.__version__}"}
        answer_requests(stepper.answer, folder, hello)
    start_barrier.close()


@contextmanager
def world(contender: Contender, rendezvous: str, timeout: float) -> Iterator[None]:
    """Join the world that a contender needs, with one thread."""
    if contender.make is Driven:
        yield
        driver().close()
        return
    if contender.name.startswith("lockstep"):
        lockstep.init(backend=contender.backend, timeout=timeout, device="cpu")
        yield
        lockstep.shutdown()
        return
    torch.set_num_threads(1)
    if not contender.backend:
        with joined(lockstep.rank(), rendezvous, timeout):
            yield
        return
    dist.init_process_group(contender.backend, timeout=timedelta(seconds=timeout))
    yield
    dist.destroy_process_group()


class Stepper:
    """One rank of a contender, with the training that it was told to begin."""

    def __init__(self, contender: Contender, rank: int, start_barrier: StartBarrier) -> None:
        self._contender = contender
        self._rank = rank
        self._start_barrier = start_barrier
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
        self._training = self._contender.make(case)
        losses = []
        for _ in range(checked):  # on the same batch: another one hardly shows what was learnt
            self._feed.refill(0)
            losses.append(self._training.step(self._feed.batch))
        known = [loss for loss in losses if loss is not None]
        return {"losses": known, "digest": self._training.digest()}

    def _block(self, calls: int, alone: bool) -> list[int]:
        """Time `calls` steps; return nanoseconds."""
        served = not self._contender.backend and self._rank > 0
        if served or (alone and self._rank > 0):
            return []
        assert self._training is not None
        assert self._feed is not None
        start_barrier = self._start_barrier if self._contender.backend and not alone else None
        return self._feed.time_steps(self._training.step, calls, start_barrier)
