"""A rank's side: it trains as it is told, and waits asleep while others are measured.

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
from benchmarks.step.answers import CHECKED, write
from benchmarks.step.ways import WAYS, Case, Training, Way
from lockstep.bench.lineup import Lineup
from lockstep.bench.rank import LINEUP, converse

__all__ = ["main"]

NOWHERE = "/dev/null"


def main(name: str, folder: str, peer: str, patience: float) -> None:
    """Join a world as the way called `name` asks for, and answer until the end."""
    way = WAYS[name]
    if way.stock:
        dist.init_process_group(way.backend, timeout=timedelta(seconds=patience))
        torch.set_num_threads(1)
    else:
        lockstep.init(backend=way.backend or None, timeout=patience, device="cpu")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lineup = Lineup(f"{folder}/{LINEUP}{peer}", rank, ranks, patience)
    stepper = Stepper(way, lineup)
    hello = {"hello": rank, "peer": peer, "library": f"torch {torch.__version__}"}
    converse(stepper.answer, folder, hello)
    stepper.close()
    lineup.close()
    if way.stock:
        dist.destroy_process_group()
    else:
        lockstep.shutdown()


class Stepper:
    """One rank of a way, with the training that it was told to begin."""

    def __init__(self, way: Way, lineup: Lineup) -> None:
        self._way, self._lineup = way, lineup
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
        lineup = None if asked["alone"] else self._lineup
        step = self._training.step
        return {"times": self._feed.timed(step, asked["block"], lineup, settling=1)}

    def close(self) -> None:
        """Let the training go."""
        self._training = None

    def _begin(self, case: Case, file: str) -> None:
        ranks = dist.get_world_size()
        self._feed = Feed([case.batch(ranks, turn) for turn in range(CHECKED)])
        self._training = self._way.make(case)
        for turn in range(CHECKED):
            self._feed.refill(turn)
            self._training.step(self._feed.batch)
        if self._way.average:
            # All ranks gather what is sharded; one of them keeps it.
            write(self._training, file if dist.get_rank() == 0 else NOWHERE)
