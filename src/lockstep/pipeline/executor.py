"""The executor of a model in pipeline stages, of which this rank holds one or several.

first batch   the model is cut into stages, unless it was cut when it was built
each step     a ScheduleExecutor takes the batch through the stages of this rank
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn

from lockstep.data.microbatch import Batch
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.model.buffers import Buffers
from lockstep.model.evaluation import Evaluation
from lockstep.model.forward import Metric
from lockstep.model.meta_device import release
from lockstep.model.side_effects import SideEffects
from lockstep.model.step_context import StepContext
from lockstep.pipeline.cut import Cut
from lockstep.pipeline.evaluator import PipelineEvaluator
from lockstep.pipeline.pipeline import Pipeline
from lockstep.pipeline.placement import Placement
from lockstep.pipeline.schedule_executor import ScheduleExecutor
from lockstep.pipeline.staging import Staging

__all__ = ["PipelineExecutor"]


class PipelineExecutor:
    """Computes steps and evaluations through the stages of this rank.

    Args:
        staging: The stages that were requested; where it gives the cut, the model is cut at
            once, and otherwise with the first batch.
        module: The whole model, of which this rank keeps its part.
        copies: Models of the same parameters, such as the average, which are cut alike.
        metrics: Functions of (outputs, targets) by name.
        seed: The seed of all random numbers.

    Attributes:
        placement: Which stages have which tensors; None before the cut.
        parameters: The parameters that this rank holds.
        owned_parameters: Those whose norm it counts: a parameter that stages share counts once.
    """

    def __init__(
        self,
        staging: Staging,
        module: nn.Module,
        copies: Sequence[nn.Module],
        metrics: Mapping[str, Metric],
        seed: int,
    ) -> None:
        self._staging, self._module, self._copies = staging, module, list(copies)
        self._metrics, self._seed = metrics, seed
        self._pipeline: Pipeline | None = None
        self._running: ScheduleExecutor | None = None
        self.placement: Placement | None = None
        self.parameters: list[nn.Parameter] = []
        self.owned_parameters: list[nn.Parameter] = []
        if (given := staging.given()) is not None:
            self._cut(*given)

    @property
    def side_effects(self) -> SideEffects:
        """What forward may write besides its result."""
        return self._linked().side_effects

    @property
    def is_complete(self) -> bool:
        """Whether every micro-batch of the current step has been computed."""
        return self._running is not None and self._running.step.batch is not None

    def parts(self) -> list[tuple[GradientReducer, Buffers]]:
        """Return gradients and buffers of each stage in the current step."""
        if self._running is None:
            return []
        return [(stage.gradients, stage.buffers) for stage in self._linked().stages.values()]

    def prepare(self, batch: Batch) -> None:
        """Cut the model, which the first batch decides on unless the cut was given."""
        if self._pipeline is None:
            first = batch.microbatches[0] if batch.microbatches else None
            self._cut(*self._staging.measured(self._module, first))

    @contextmanager
    def open(self, step: StepContext) -> Iterator[ScheduleExecutor]:
        """Seed the generators of every stage while the body computes a step."""
        self._running = ScheduleExecutor(step, self._linked(), self._metrics)
        with self._running.opened():
            yield self._running

    def compute(self, step: StepContext, batch: Any) -> None:
        """Take this rank's part of a batch through its stages."""
        assert self._running is not None
        self._running.run(batch)

    def position(self) -> tuple[int, int] | None:
        """Return the micro-batch and the stage that are being computed; None between them."""
        return None if self._running is None else self._running.position()

    def broadcast_tied_gradients(self, attempt: int) -> None:
        """Give the sums of parameters on several stages to all of them."""
        self._linked().broadcast_tied_gradients(attempt)

    def reset(self) -> None:
        """Connect the stages anew: messages of the failed step may still be under way."""
        self._linked().connect()

    def evaluate(self, model: nn.Module | None, batches: Iterable[Batch]) -> Evaluation:
        """Return the evaluation of the model, or of one of its copies."""
        coming = iter(batches)
        first = next(coming)
        self.prepare(first)
        assert self.placement is not None
        evaluated = self._module if model is None else model
        evaluator = PipelineEvaluator(
            evaluated, self.placement, self._linked(), self._metrics, self._seed
        )
        return evaluator.run(chain([first], coming))

    def _linked(self) -> Pipeline:
        assert self._pipeline is not None, "the model has not been cut into stages yet"
        return self._pipeline

    def _cut(self, cut: Cut, schedule: str, stages_per_rank: int) -> None:
        """Make this rank's stages, and free the rest of the model."""
        placement = Placement.of(self._staging.parallel, cut, self._module)
        for module in (self._module, *self._copies):
            release(module, placement.here)
        self.placement = placement
        self._pipeline = placement.pipeline(self._module, self._seed, schedule, stages_per_rank)
        named = list(self._module.named_parameters())
        self.parameters = [each for name, each in named if placement.here(name)]
        self.owned_parameters = [each for name, each in named if placement.owned(name)]
