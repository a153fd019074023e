"""A rank's side: it trains on request, and waits asleep while others are measured.

{"train": {...case}, "file": path}   -> {}: trained CHECKED steps; rank 0 wrote the parameters
{"block": 5, "alone": false}         -> {"times": [ns, ...]}, after one step that only settles
end of file                          the rank leaves
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import lockstep
from benchmarks.feed import Feed
from benchmarks.rank_processes import START_BARRIER, answer_requests
from benchmarks.step.answers import CHECKED, write
from benchmarks.step.contenders import CONTENDERS, Case, Contender, Training
from lockstep.tools.bench.start_barrier import StartBarrier

__all__ = ["main"]

NOWHERE = "/dev/null"


def main(name: str, folder: str, key: str, timeout: float) -> None:
    """Join a world as contender `name` asks for, and answer until the end."""
    contender = CONTENDERS[name]
    if contender.stock:
        dist.init_process_group(contender.backend, timeout=timedelta(seconds=timeout))
        torch.set_num_threads(1)
    else:
        lockstep.init(backend=contender.backend or None, timeout=timeout, device="cpu")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    start_barrier = StartBarrier(f"{folder}/{START_BARRIER}{key}", rank, ranks, timeout)
    stepper = Stepper(contender, start_barrier)
    hello = {"hello": rank, "runner": key, "library": f"torch {torch.__version__}"}
    answer_requests(stepper.answer, folder, hello)
    stepper.close()
    start_barrier.close()
    if contender.stock:
        dist.destroy_process_group()
    else:
        lockstep.shutdown()


class Stepper:
    """One rank of a contender, with the training that it was told to begin."""

    def __init__(self, contender: Contender, start_barrier: StartBarrier) -> None:
        self._contender = contender
        self._start_barrier = start_barrier
        self._training: Training | None = None
        self._feed: Feed | None = None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked."""
        if "train" in asked:
            self._begin(Case(**asked["train"]), asked["file"])
            return {}
        if asked["alone"] and dist.get_rank() > 0:
            return {"times": []}
        assert self._training is not None
        assert self._feed is not None
        start_barrier = None if asked["alone"] else self._start_barrier
        step = self._training.step
        return {"times": self._feed.time_steps(step, asked["block"], start_barrier, settling=1)}

    def close(self) -> None:
        """Let the training go."""
        self._training = None

    def _begin(self, case: Case, file: str) -> None:
        ranks = dist.get_world_size()
        self._feed = Feed([case.batch(ranks, turn) for turn in range(CHECKED)])
        self._training = self._contender.make(case)
        for turn in range(CHECKED):
            self._feed.refill(turn)
            self._training.step(self._feed.batch)
        if self._contender.average:
            # All ranks gather what is sharded; one of them keeps it.
            write(self._training, file if dist.get_rank() == 0 else NOWHERE)
