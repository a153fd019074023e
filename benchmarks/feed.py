"""The feed: batches that are written into the same memory, and the steps timed on them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.tools.bench.start_barrier import StartBarrier

__all__ = ["Feed"]

Batch = tuple[torch.Tensor, torch.Tensor]


class Feed:
    """Batches by turns; `batch` is where each of them is put."""

    def __init__(self, sources: Sequence[Batch]) -> None:
        self._sources = sources
        inputs, targets = sources[0]
        self.batch: Batch = inputs.clone(), targets.clone()

    def refill(self, turn: int) -> None:
        """Write another batch into the same memory, as a loader would."""
        source = self._sources[turn % len(self._sources)]
        for target, values in zip(self.batch, source, strict=True):
            target.copy_(values)

    def time_steps(
        self,
        step: Callable[[Batch], Any],
        calls: int,
        start_barrier: StartBarrier | None,
        settling: int = 0,
    ) -> list[int]:
        """Time `calls` steps after some that only settle; return nanoseconds.

        The ranks begin each step together at the `start_barrier`, where there is one.
        """
        times = []
        clock = time.perf_counter_ns
        gc.disable()
        try:
            for turn in range(settling + calls):
                self.refill(turn)
                if start_barrier is not None:
                    start_barrier.wait()
                begun = clock()
                step(self.batch)
                times.append(clock() - begun)
        finally:
            gc.enable()
        return times[settling:]
