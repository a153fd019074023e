"""The schedule executor: one step through the pipeline stages of this rank.

The schedule says which action comes when, and several micro-batches are in flight. What a
stage raises stops the step on every rank: the neighbours are told at once, and the status of
the rank tells everyone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from lockstep.data.microbatch import Microbatch
from lockstep.errors import LostError, StoppedError
from lockstep.model.buffers import Buffers
from lockstep.model.forward import Metric, measured, own_loss, parts
from lockstep.model.step_context import ComputedMicrobatch, Span, StepContext
from lockstep.pipeline.aliasing import Arrival
from lockstep.pipeline.boundary import assembled, flattened
from lockstep.pipeline.draws import Draws
from lockstep.pipeline.graph_entry import Entry
from lockstep.pipeline.p2p import Receiver
from lockstep.pipeline.pipeline import Pipeline
from lockstep.pipeline.schedules import Action
from lockstep.pipeline.stage import Stage, StageInput, first_input
from lockstep.pipeline.tied_weights import without_hooks
from lockstep.randomness import isolated

__all__ = ["ScheduleExecutor"]


class ScheduleExecutor:
    """Computes one step on the stages of this rank."""

    def __init__(
        self, step: StepContext, pipeline: Pipeline, metrics: Mapping[str, Metric]
    ) -> None:
        self.step, self.pipeline = step, pipeline
        self._parallel, self._metrics = step.parallel, metrics
        self._microbatches_here: list[Microbatch] = []
        self._missing: dict[int, list[int]] = {}
        self._doing: tuple[Stage, int] | None = None
        self._waited, self._source, self._bytes = 0.0, -1, 0

    @contextmanager
    def opened(self) -> Iterator[ScheduleExecutor]:
        """Let the body compute the step: buffers, seeds and recomputation of every stage."""
        stages = list(self.pipeline.stages.values())
        with ExitStack() as stack:
            for stage in stages:
                stage.begin(Buffers(self._modules(stage)))
                stack.enter_context(stage.units.hooked())
                stack.enter_context(stage.recomputation.active(stage.buffers))
            stack.enter_context(isolated(self._parallel.device, everything=True))
            try:
                yield self
            finally:
                for stage in stages:
                    stage.end()

    def run(self, batch: Any) -> None:
        """Take every micro-batch of this replica forward and backward through the stages here.

        What a stage raises is kept in the step, which then ends on every rank.
        """
        self._prepare(batch)
        try:
            for action in self.pipeline.actions(len(self._microbatches_here)):
                self._do(action)
            for stage in self.pipeline.stages.values():
                self._skip_absent(stage)
        except LostError:
            raise
        except Exception as error:
            self._fail(error)

    def position(self) -> tuple[int, int] | None:
        """Return the micro-batch and the stage of the current action."""
        return (self._doing[1], self._doing[0].number) if self._doing else None

    @property
    def place(self) -> str:
        """Rank, stage, step and micro-batch, for messages."""
        if self._doing is None:
            return f"rank {self._parallel.rank}, step {self.step.number}"
        stage, leaf = self._doing
        where = f"rank {self._parallel.rank}, stage {stage.number}"
        return f"{where}, step {self.step.number}, micro-batch {leaf}"

    # --- before the first action and after the last -------------------------------------------

    def _modules(self, stage: Stage) -> dict[str, Any]:
        found = dict(stage.named)
        if stage.number == self.pipeline.last:
            found |= self._parallel.loss_module()
        return found

    def _prepare(self, batch: Any) -> None:
        batch = self.step.start(batch)
        for stage in self.pipeline.stages.values():
            stage.gradients.begin(batch.leaves)
            self._missing[stage.number] = [each.index for each in batch.microbatches]
        self._microbatches_here = [
            each for each in batch.microbatches if each.index in self.step.shares
        ]
        if self._microbatches_here:
            for ends in self.pipeline.ends.values():
                if ends.inputs is not None:
                    ends.inputs.post()

    def _skip_absent(self, stage: Stage, before: int | None = None) -> None:
        """Skip the micro-batches that are left out, up to leaf `before`."""
        missing = self._missing[stage.number]
        while missing and missing[0] != before:
            stage.gradients.skip(missing.pop(0))

    # --- one action ---------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        stage = self.pipeline.stages[action.stage]
        microbatch = self._microbatches_here[action.microbatch]
        self._doing = stage, microbatch.index
        self._waited, self._source, self._bytes = 0.0, -1, 0
        begun = time.perf_counter()
        if action.kind == "forward":
            self._forward(stage, microbatch, action.microbatch)
        else:
            autocast = torch.autocast(self._parallel.device.type, enabled=False)
            with autocast, stage.recomputation.told():
                self._backward(stage, microbatch.index, action.kind)
            if action.kind != "input":
                self._finish_leaf(stage, microbatch)
        if self.step.is_traced:
            self.step.spans.append(
                Span(
                    action.kind, stage.number, microbatch.index, begun, time.perf_counter(),
                    self._waited, self._source, self._bytes,
                )
            )  # fmt: skip
        self._doing = None

    def _forward(self, stage: Stage, microbatch: Microbatch, position: int) -> None:
        leaf, ends = microbatch.index, self.pipeline.ends[stage.number]
        place = self.place
        if ends.inputs is None:
            given = first_input(microbatch, self._parallel, place)
        else:
            more = position + 1 < len(self._microbatches_here)
            pattern, tensors = self._received(ends.inputs, leaf, more)
            entry = Entry(tensors, [form.differentiable for form in ends.inputs.forms])
            arrival = Arrival.of(pattern, entry.tensors)
            given = StageInput(assembled(pattern, entry.tensors), arrival, ends.inputs.draws, entry)
        loss = self._loss(microbatch, place) if ends.outputs is None else None
        with self._parallel.autocast():
            made = stage.forward(self.step.number, leaf, given, place, loss)
        if ends.outputs is not None:
            ends.outputs.send(
                made.pattern, made.tensors, self.step.attempt.number, leaf, made.draws
            )

    def _loss(self, microbatch: Microbatch, place: str) -> Callable[[Any], torch.Tensor]:
        """Return what makes the scaled loss of the model's outputs, and notes it."""

        def scaled(outputs: Any) -> torch.Tensor:
            metrics: dict[str, Any] = {}
            if self._parallel.loss is None:
                loss = own_loss(outputs, place)
            else:
                targets = parts(self._parallel.moved(microbatch.data), place)[1]
                loss, metrics = measured(
                    self._parallel.loss, self._metrics, outputs, targets, place
                )
            self.step.check_loss(loss, place)
            share = self.step.shares[microbatch.index]
            computed = ComputedMicrobatch(microbatch, share, [loss.detach()], metrics)
            self.step.computed.append(computed)
            with torch.autocast(self._parallel.device.type, enabled=False):
                result: torch.Tensor = loss * share
            return result

        return scaled

    def _backward(self, stage: Stage, leaf: int, kind: str) -> None:
        place = self.place
        if kind == "weight":
            stage.backward_weights(leaf, place)
            return
        ends = self.pipeline.ends[stage.number]
        gradients: Sequence[torch.Tensor | None] | None = None
        draws: Draws | None = None
        if ends.gradients is not None:
            gradients = ()
            if stage.outputs(leaf):
                gradients = assembled(*self._received(ends.gradients, leaf))
                draws = ends.gradients.draws
        tied = self.pipeline.ties_down(stage.number)
        also = [pair for tie in tied for pair in tie.taken(self.step.attempt.number, leaf)]
        ties_up = self.pipeline.ties_up(stage.number)
        with without_hooks([parameter for tie in ties_up for parameter in tie.parameters]):
            if kind == "input":
                whole = self.pipeline.tied_parameters(stage.number)
                made, draws = stage.backward_inputs(leaf, gradients, whole, also, draws, place)
            else:
                made, draws = stage.backward(leaf, gradients, also, draws, place)
        if ends.to_inputs is not None and made:
            ends.to_inputs.send(*flattened(tuple(made)), self.step.attempt.number, leaf, draws)
        for tie in ties_up:
            tie.hand_on(stage.taken(leaf, tie.parameters), self.step.attempt.number, leaf)

    def _finish_leaf(self, stage: Stage, microbatch: Microbatch) -> None:
        self._skip_absent(stage, microbatch.index)
        self._missing[stage.number].pop(0)
        stage.finish(microbatch.index, microbatch.size / self.step.samples)

    def _received(self, receiver: Receiver, leaf: int, more: bool = False) -> Any:
        begun, before = time.perf_counter(), receiver.received
        try:
            return receiver.receive(self.step.attempt.number, leaf, more)
        finally:
            waited = time.perf_counter() - begun
            self._waited += waited
            self.step.idle += waited
            self._source = receiver.peer
            self._bytes += receiver.received - before

    def _fail(self, error: Exception) -> None:
        """Tell the neighbours; the status of this rank tells everyone."""
        self.step.error = error
        if isinstance(error, StoppedError):
            self.step.stopped = str(error)
        else:
            first = (str(error).splitlines() or [""])[0]
            has_place = first.startswith(self.place)
            sentence = first if has_place else f"{self.place}: {type(error).__name__}: {first}"
            self.step.stopped = sentence
            error.add_note(f"in {self.place}")
        with suppress(RuntimeError):
            self.pipeline.fail(self.step.stopped, self.step.attempt.number)
