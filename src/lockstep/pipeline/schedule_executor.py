"""The schedule executor: one step through the pipeline stage of this rank.

The schedule determines the order of actions; several micro-batches are in flight. An exception
in a stage stops the step on every rank: the neighbors receive it at once, the other ranks receive
it with the status of this rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lockstep.data.microbatch import Microbatch
from lockstep.kernel.errors import LayoutError, LostError, StoppedError
from lockstep.kernel.seeds import isolated
from lockstep.kernel.step_context import ComputedMicrobatch, StepContext, StepFailure
from lockstep.model.forward import Metric, compute_results
from lockstep.model.loss_root import record_loss, scale_loss
from lockstep.model.loss_shares import start_batch
from lockstep.pipeline.aliasing import ReceivedTensors
from lockstep.pipeline.boundary import flatten, unflatten
from lockstep.pipeline.composition import Composition
from lockstep.pipeline.graph_input import GraphInput
from lockstep.pipeline.p2p import Receiver, RngState
from lockstep.pipeline.pipeline import Pipeline
from lockstep.pipeline.schedule import Action, order_actions
from lockstep.pipeline.stage import StageInput, make_first_input
from lockstep.pipeline.stage_buffers import StageBuffers
from lockstep.pipeline.stage_span import StageSpan
from lockstep.pipeline.tied_weights import disable_hooks

__all__ = ["ScheduleExecutor"]


class ScheduleExecutor:
    """Computes one step on the stage of this rank; `composition` is checked before, if given."""

    def __init__(
        self,
        step: StepContext,
        pipeline: Pipeline,
        metrics: Mapping[str, Metric],
        composition: Composition | None,
    ) -> None:
        self.step, self.pipeline, self._composition = step, pipeline, composition
        self._parallel, self._metrics = pipeline.parallel, metrics
        self._stage, self._links = pipeline.stage, pipeline.links
        self._microbatches_here: list[Microbatch] = []
        self._missing: list[int] = []
        self._current: int | None = None
        self._begun = 0.0
        self._waited, self._source, self._bytes = 0.0, -1, 0

    @contextmanager
    def activate(self) -> Iterator[ScheduleExecutor]:
        """Set up the buffers, seeds and activation checkpointing of the stage in the body."""
        stage = self._stage
        stage.begin(StageBuffers(self.pipeline.modules()))
        with (
            stage.checkpointing.enable(stage.buffers),
            stage.scopes.install_hooks(),
            isolated(self._parallel.device, everything=True),
        ):
            try:
                yield self
            finally:
                stage.end()

    def compute(self, batch: Any) -> None:
        """Run every micro-batch of this replica forward and backward through the stage.

        An exception in a stage is stored in the step, which then ends on every rank.
        """
        self._prepare(batch)
        try:
            if self.pipeline.failure:
                raise LayoutError(f"{self.where}: {self.pipeline.failure}")
            if self._composition is not None and self._microbatches_here:
                given = make_first_input(self._microbatches_here[0], self._parallel, self.where)
                with self._parallel.autocast():
                    self._composition.check(given.data)
            if count := len(self._microbatches_here):
                for action in order_actions(self._stage.number, self._parallel.stages, count):
                    self._execute(action)
            self._skip_absent()
        except LostError:
            raise
        except Exception as error:
            self._fail(error)

    def position(self) -> tuple[int, int] | None:
        """Return the micro-batch and the stage of the current action; None between actions."""
        return None if self._current is None else (self._current, self._stage.number)

    @property
    def where(self) -> str:
        """Rank, stage, step and micro-batch, for messages."""
        if self._current is None:
            return f"rank {self._parallel.rank}, step {self.step.number}"
        here = f"rank {self._parallel.rank}, stage {self._stage.number}"
        return f"{here}, step {self.step.number}, micro-batch {self._current}"

    # --- before the first action and after the last -------------------------------------------

    def _prepare(self, batch: Any) -> None:
        batch = start_batch(self.step, batch, self._parallel.count_ignored)
        self._stage.gradients.begin(batch.leaves, self._parallel.hosts)
        self._missing = [part.index for part in batch.microbatches]
        self._microbatches_here = [
            part for part in batch.microbatches if part.index in self.step.shares
        ]
        if self._microbatches_here and self._links.inputs is not None:
            self._links.inputs.post()

    def _skip_absent(self, before: int | None = None) -> None:
        """Skip the micro-batches without weight that come before index `before`."""
        while self._missing and self._missing[0] != before:
            self._stage.gradients.skip(self._missing.pop(0))

    # --- one action ---------------------------------------------------------------------------

    def _execute(self, action: Action) -> None:
        microbatch = self._microbatches_here[action.microbatch]
        self._current = microbatch.index
        self._waited, self._source, self._bytes = 0.0, -1, 0
        self._begun = time.perf_counter()
        if action.kind == "forward":
            self._forward(microbatch, action.microbatch)
        else:
            with self._parallel.without_autocast(), self._stage.checkpointing.explain_errors():
                self._backward(microbatch.index)
            self._finish_microbatch(microbatch)
        if self.step.spans is not None:
            self.step.spans.append(
                StageSpan(
                    action.kind, self._stage.number, microbatch.index, self._begun,
                    time.perf_counter(), self._waited, self._source, self._bytes,
                )
            )  # fmt: skip
        self._current = None

    def _forward(self, microbatch: Microbatch, position: int) -> None:
        index, links = microbatch.index, self._links
        where = self.where
        if links.inputs is None:
            given = make_first_input(microbatch, self._parallel, where)
        else:
            more = position + 1 < len(self._microbatches_here)
            structure, tensors = self._receive(links.inputs, index, more)
            graph_input = GraphInput(tensors, [meta.requires_grad for meta in links.inputs.metas])
            received = ReceivedTensors.from_structure(structure, graph_input.tensors)
            given = StageInput(
                unflatten(structure, graph_input.tensors),
                received,
                links.inputs.rng_state,
                graph_input,
            )
        loss = self._make_loss(microbatch, where) if links.outputs is None else None
        for observer in self.step.observers:
            observer.begin_microbatch()
        with self._parallel.autocast():
            made = self._stage.forward(self.step.number, index, given, where, loss)
        for observer in self.step.observers:
            for root in made.tensors:
                observer.record_graph(root, (self.step.number, index))
        if links.outputs is not None:
            links.outputs.send(
                made.structure, made.tensors, self.step.attempt.number, index, made.rng_state
            )

    def _make_loss(self, microbatch: Microbatch, where: str) -> Callable[[Any], torch.Tensor]:
        """Return the function that computes and records the scaled loss of the model's outputs."""

        def scaled(outputs: Any) -> torch.Tensor:
            data = microbatch.data
            if self._parallel.loss is not None or self._metrics:
                data = self._parallel.move_to_device(data)
            function = self.step.find_loss(microbatch, data)
            loss, metrics = compute_results(function, self._metrics, outputs, data, where)
            record_loss(self.step, loss, where)
            share = self.step.shares[microbatch.index]
            computed = ComputedMicrobatch(microbatch, share, [loss.detach()], metrics)
            self.step.computed.append(computed)
            with self._parallel.without_autocast():
                return scale_loss(loss, share, self._parallel.loss_scale)

        return scaled

    def _backward(self, index: int) -> None:
        links, attempt = self._links, self.step.attempt.number
        gradients: Sequence[torch.Tensor | None] | None = None
        rng_state: RngState | None = None
        if links.gradients is not None:
            gradients = ()
            if self._stage.count_outputs(index):
                gradients = unflatten(*self._receive(links.gradients, index))
                rng_state = links.gradients.rng_state
        tied_roots = [
            pair
            for tie in self.pipeline.ties_to_later
            for pair in tie.receive_gradients(attempt, index)
        ]
        ties = self.pipeline.ties_to_earlier
        with disable_hooks([parameter for tie in ties for parameter in tie.parameters]):
            made, rng_state = self._stage.backward(
                index, gradients, tied_roots, rng_state, self.where
            )
        if links.to_inputs is not None and made:
            links.to_inputs.send(*flatten(tuple(made)), attempt, index, rng_state)
        for tie in ties:
            tie.send_gradients(attempt, index)

    def _finish_microbatch(self, microbatch: Microbatch) -> None:
        stage = self._stage
        self._skip_absent(microbatch.index)
        self._missing.pop(0)
        if self.step.observers:
            gradients, buffers = stage.gradients.hash_current, stage.buffers.current
            self.step.observe_microbatch(microbatch.index, gradients, buffers)
        with self.step.in_phase("reduction"):
            stage.finish(microbatch.index, microbatch.size / self.step.samples)

    def _receive(self, receiver: Receiver, index: int, more: bool = False) -> Any:
        begun, before = time.perf_counter(), receiver.received_bytes
        try:
            return receiver.receive(self.step.attempt.number, index, more)
        finally:
            ended = time.perf_counter()
            waited = ended - begun
            self._waited += waited
            # The span begins with its waits: delays before them, such as time without a core, do
            # not count.
            self._begun = ended - self._waited
            self.step.times.idle += waited
            self._source = receiver.peer
            self._bytes += receiver.received_bytes - before

    def _fail(self, error: Exception) -> None:
        """Notify the neighbors; the status of this rank notifies all other ranks."""
        sentence = str(error)
        if not isinstance(error, StoppedError):
            first = (sentence.splitlines() or [""])[0]
            says_where = first.startswith(self.where)
            sentence = first if says_where else f"{self.where}: {type(error).__name__}: {first}"
            error.add_note(f"in {self.where}")
        self.step.failure = StepFailure("stopped", sentence, error)
        with suppress(RuntimeError):
            self.pipeline.fail(sentence, self.step.attempt.number)
