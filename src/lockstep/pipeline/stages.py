"""The stages of a trainer on this rank: made with the first batch, then trained and evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from torch import nn

from lockstep.data.microbatch import Batch
from lockstep.errors import UsageError
from lockstep.model.attempt import Attempt
from lockstep.model.evaluation import Evaluation
from lockstep.model.fingerprinter import Fingerprinter
from lockstep.model.forward import Metric
from lockstep.model.meta_device import release
from lockstep.model.optimization import Optimization
from lockstep.model.parallel_context import Setting
from lockstep.model.step import Step
from lockstep.model.turn import Turn
from lockstep.model.update import Update
from lockstep.model.watch import Watch
from lockstep.pipeline.cut import Cut
from lockstep.pipeline.passage import Passage
from lockstep.pipeline.pipeline import Pipeline
from lockstep.pipeline.placement import Placement
from lockstep.pipeline.staging import Staging
from lockstep.pipeline.state import State
from lockstep.pipeline.streaming import Stream

__all__ = ["Stages"]


class Stages:
    """What a trainer with stages does instead of calling its model.

    Parameters:
        staging: what was asked; where it gives the cut, the model is cut at once.
        module: the whole model, from which this rank keeps its part.
        state: is told where the parts are.
    """

    def __init__(
        self,
        staging: Staging,
        module: nn.Module,
        state: State,
        optimization: Optimization,
        metrics: Mapping[str, Metric],
        seed: int,
        clip_norm: float | None,
    ) -> None:
        self.setting: Setting = staging.setting
        self._staging, self._module, self._state = staging, module, state
        self._optimization, self._metrics = optimization, metrics
        self._seed, self._clip_norm = seed, clip_norm
        self._pipeline: Pipeline | None = None
        self.update: Update | None = None
        self.watch: Watch | None = None
        self.fingerprinter: Fingerprinter | None = None
        if (given := staging.given()) is not None:
            self._cut(*given)

    def step(self, attempt: Attempt, finish: Callable[[Turn], None]) -> Step:
        """Refuse: a loop of one's own calls the model, which is on several ranks."""
        raise UsageError(
            "a loop of one's own needs the whole model on every rank: with stages, call "
            "trainer.step(batch), or train with stages=1"
        )

    def train(self, attempt: Attempt, batch: Any, finish: Callable[[Turn], None]) -> None:
        """Train on one batch, through the stages."""
        batch = self.setting.cut(batch)
        pipeline = self._linked(batch)
        passage = Passage(attempt, self.setting, pipeline, self._metrics, finish, self.watch)
        passage.fingerprinter = self.fingerprinter
        with passage:
            passage.train(batch)

    def evaluate(self, batches: Iterable[Batch], *, average: bool) -> Evaluation:
        """Return the evaluation of the model, or of its averaged weights."""
        coming = iter(batches)
        first = next(coming)
        pipeline = self._linked(first)
        averaged = self._optimization.average
        model = averaged.module if average and averaged is not None else self._module
        placement = self._state.placement
        assert placement is not None
        stream = Stream(model, placement, pipeline, self._metrics, self._seed)
        return stream.run(chain([first], coming))

    def _linked(self, batch: Batch) -> Pipeline:
        """Return the pipeline; the first batch decides on the cut, where none was given."""
        if self._pipeline is None:
            first = batch.microbatches[0] if batch.microbatches else None
            self._cut(*self._staging.measured(self._module, first))
        assert self._pipeline is not None
        return self._pipeline

    def _cut(self, cut: Cut, schedule: str, chunks: int) -> None:
        """Make this rank's stages, and let go of the rest of the model."""
        placement = Placement.of(self.setting, cut, self._module)
        averaged = self._optimization.average
        for module in (self._module, *([averaged.module] if averaged else [])):
            release(module, placement.here)
        self._state.placement = placement
        self._pipeline = placement.pipeline(self._module, self._seed, schedule, chunks)
        named = list(self._module.named_parameters())
        self.update = Update(
            self.setting,
            [each for name, each in named if placement.here(name)],
            [each for name, each in named if placement.owned(name)],
            self._optimization,
            self._clip_norm,
        )
