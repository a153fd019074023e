"""Streaming: an evaluation through stages, forward only.

rank 0   stage 0   F0 F1 F2 F3 | F0 F1 ...      the next batch follows at once
rank 1   stage 1      F0 F1 F2 F3 | F0 ...      losses and metrics of every micro-batch
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch import nn

from lockstep.data.microbatch import Batch, Microbatch
from lockstep.errors import LostError, StoppedError
from lockstep.model.buffers import Buffers
from lockstep.model.evaluation import Evaluation, Row, combined, evaluating, row
from lockstep.model.forward import Metric, measured, own_loss, parts
from lockstep.pipeline.aliasing import Arrival, Departure
from lockstep.pipeline.boundary import assembled
from lockstep.pipeline.draws import Draws
from lockstep.pipeline.pipeline import Pipeline
from lockstep.pipeline.placement import Placement
from lockstep.pipeline.stage import StageInput, first_input
from lockstep.randomness import isolated

__all__ = ["PipelineEvaluator"]

EVALUATION = 1 << 62
"""What the pages of an evaluation's batches are numbered from; no attempt gets so far."""


class PipelineEvaluator:
    """One evaluation of `model` (the trained one, or a copy of it) through the stages here."""

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        pipeline: Pipeline,
        metrics: Mapping[str, Metric],
        seed: int,
    ) -> None:
        self._model, self._pipeline, self._metrics = model, pipeline, metrics
        self._parallel = pipeline.parallel
        self._blocks = {s: placement.select_blocks(model, s) for s in pipeline.stages}
        self._units = {s: placement.make_units(model, s, seed) for s in pipeline.stages}
        self._buffers = {s: Buffers(self._modules(s)) for s in pipeline.stages}
        self._rows: list[Row] = []
        self._sent: list[tuple[str, Departure]] = []
        self._place = f"rank {self._parallel.rank}, an evaluation"

    def run(self, batches: Iterable[Batch]) -> Evaluation:
        """Go through all batches, and combine what all ranks found."""
        failed: Exception | None = None
        failure = ""
        try:
            self._run(batches)
        except LostError:
            raise
        except Exception as error:
            failed = error
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            failure = str(error) if isinstance(error, StoppedError) else f"{self._place}: {said}"
            with suppress(RuntimeError):
                self._pipeline.fail(failure, EVALUATION)
        try:
            return combined(self._rows, self._parallel, failure)
        except StoppedError:
            self._pipeline.connect()
            if failed is not None and not isinstance(failed, StoppedError):
                raise failed from None
            raise

    def _modules(self, stage: int) -> dict[str, nn.Module]:
        last = stage == self._pipeline.last
        return self._blocks[stage] | (self._parallel.loss_module() if last else {})

    def _run(self, batches: Iterable[Batch]) -> None:
        with ExitStack() as stack:
            stack.enter_context(evaluating(self._model))
            stack.enter_context(isolated(self._parallel.device, everything=True))
            for units in self._units.values():
                stack.enter_context(units.hooked())
            for number, batch in enumerate(batches):
                self._batch(number, batch)

    def _batch(self, number: int, batch: Batch) -> None:
        for stage in sorted(self._pipeline.stages):
            for position, microbatch in enumerate(batch.microbatches):
                more = position + 1 < len(batch.microbatches)
                self._forward(stage, number, microbatch, more)
            while self._sent:
                place, sent = self._sent.pop()
                sent.check(place)
            outputs = self._pipeline.ends[stage].outputs
            if outputs is not None:
                outputs.drain(left=len(batch.microbatches))  # never far ahead of the next stage

    def _forward(self, stage: int, number: int, microbatch: Microbatch, more: bool) -> None:
        parallel, ends, leaf = self._parallel, self._pipeline.ends[stage], microbatch.index
        rank = parallel.rank
        place = f"rank {rank}, stage {stage}, evaluation batch {number}, micro-batch {leaf}"
        self._place = place
        if ends.inputs is None:
            given = first_input(microbatch, parallel, place)
        else:
            pattern, tensors = ends.inputs.receive(EVALUATION + number, leaf, more)
            arrival = Arrival.of(pattern, tensors)
            given = StageInput(assembled(pattern, tensors), arrival, ends.inputs.draws)
        units, inspection = self._units[stage], self._pipeline.stages[stage].inspection
        units.begin(-1 - number, leaf, given.draws.call)
        with self._buffers[stage].untouched(), parallel.autocast():
            blocks = list(self._blocks[stage].values())
            value, others = inspection.composed(blocks, given.data, place, given.draws.others)
            draws = Draws(units.last_call, others)
            if ends.outputs is None:
                units.end()
                measured = partial(self._measured, microbatch=microbatch, place=place)
                loss, metrics = inspection.loss(measured, value, place, others)
                given.arrival.check(place)
            else:
                pattern, tensors = inspection.handed_on(value, blocks, given.arrival, place)
        units.pause()
        if ends.outputs is None:
            self._rows.append(row(parallel, microbatch, loss, metrics, place))
        else:
            ends.outputs.send(pattern, tensors, EVALUATION + number, leaf, draws)
            self._sent.append((place, Departure(tensors)))

    def _measured(
        self, outputs: Any, microbatch: Microbatch, place: str
    ) -> tuple[Any, dict[str, Any]]:
        if self._parallel.loss is None:
            return own_loss(outputs, place), {}
        targets = parts(self._parallel.moved(microbatch.data), place)[1]
        return measured(self._parallel.loss, self._metrics, outputs, targets, place)
