"""The schedule executor: one step through the pipeline stages of this rank.

The schedule determines the order of actions; several micro-batches are in flight. An exception
in a stage stops the step on every rank: the neighbors receive it at once, the other ranks receive
it with the status of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from lockstep.data.microbatch import Microbatch
from lockstep.kernel.errors import LayoutError, StoppedError
from lockstep.kernel.seeds import isolated
from lockstep.kernel.step_context import ComputedMicrobatch, StepContext, StepFailure
from lockstep.launcher.failure_codes import is_lost_peer
from lockstep.model.forward import Metric, compute_results
from lockstep.model.loss_root import record_loss, scale_loss
from lockstep.model.loss_shares import start_batch
from lockstep.pipeline.boundary import flatten, unflatten
from lockstep.pipeline.composition import Composition
from lockstep.pipeline.p2p import LinkError, RngState
from lockstep.pipeline.pipeline import Pipeline
from lockstep.pipeline.schedules import Action
from lockstep.pipeline.split_backward import GraphInput
from lockstep.pipeline.stage import Stage, StageBuffers, StageInput, make_first_input
from lockstep.pipeline.tied_weights import disable_hooks

__all__ = ["ScheduleExecutor"]


class ScheduleExecutor:
    """Computes one step on the stages of this rank; `composition` is checked before, if given."""

    def __init__(
        self,
        step: StepContext,
        pipeline: Pipeline,
        metrics: Mapping[str, Metric],
        composition: Composition | None,
    ) -> None:
        self.step = step
        self.pipeline = pipeline
        self._composition = composition
        self._parallel = pipeline.parallel
        self._metrics = metrics
        self._microbatches_here: list[Microbatch] = []
        self._missing: dict[int, list[int]] = {}
        self._current: tuple[Stage, int] | None = None

    @contextmanager
    def activate(self) -> Iterator[ScheduleExecutor]:
        """Set up the buffers, seeds and activation checkpointing of every stage in the body."""
        stages = list(self.pipeline.stages.values())
        with ExitStack() as stack:
            for stage in stages:
                stage.begin(StageBuffers(self.pipeline.add_loss(stage.number, stage.blocks)))
                stack.enter_context(stage.checkpointing.enable(stage.buffers))
                stack.enter_context(stage.scopes.install_hooks())
            stack.enter_context(isolated(self._parallel.device, everything=True))
            try:
                yield self
            finally:
                for stage in stages:
                    stage.end()

    def compute(self, batch: Any) -> None:
        """Run every micro-batch of this replica forward and backward through the local stages.

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
            for action in self.pipeline.get_actions(len(self._microbatches_here)):
                self._execute(action)
            for stage in self.pipeline.stages.values():
                self._skip_absent(stage)
        except LinkError:
            raise
        except Exception as error:
            if is_lost_peer(error):
                raise
            self._fail(error)

    def position(self) -> tuple[int, int] | None:
        """Return the micro-batch and the stage of the current action; None between actions."""
        return (self._current[1], self._current[0].number) if self._current else None

    @property
    def where(self) -> str:
        """Rank, stage, step and micro-batch, for messages."""
        if self._current is None:
            return f"rank {self._parallel.rank}, step {self.step.number}"
        stage, index = self._current
        here = f"rank {self._parallel.rank}, stage {stage.number}"
        return f"{here}, step {self.step.number}, micro-batch {index}"

    # --- before the first action and after the last -------------------------------------------

    def _prepare(self, batch: Any) -> None:
        batch = start_batch(self.step, batch, self._parallel.count_ignored)
        for stage in self.pipeline.stages.values():
            stage.gradients.begin(batch.leaves, self._parallel.hosts)
            self._missing[stage.number] = [part.index for part in batch.microbatches]
        self._microbatches_here = [
            part for part in batch.microbatches if part.index in self.step.shares
        ]
        if self._microbatches_here:
            for links in self.pipeline.links.values():
                if links.inputs is not None:
                    links.inputs.post()

    def _skip_absent(self, stage: Stage, before: int | None = None) -> None:
        """Skip the micro-batches without weight that come before index `before`."""
        missing = self._missing[stage.number]
        while missing and missing[0] != before:
            stage.gradients.skip(missing.pop(0))

    # --- one action ---------------------------------------------------------------------------

    def _execute(self, action: Action) -> None:
        stage = self.pipeline.stages[action.stage]
        microbatch = self._microbatches_here[action.microbatch]
        self._current = stage, microbatch.index
        if action.kind == "forward":
            self._forward(stage, microbatch, action.microbatch)
        else:
            with self._parallel.without_autocast(), stage.checkpointing.explain_errors():
                self._backward(stage, microbatch.index, action.kind)
            if action.kind != "input":
                self._finish_microbatch(stage, microbatch)
        self._current = None

    def _forward(self, stage: Stage, microbatch: Microbatch, position: int) -> None:
        index = microbatch.index
        links = self.pipeline.links[stage.number]
        where = self.where
        if links.inputs is None:
            given = make_first_input(microbatch, self._parallel, where)
        else:
            more = position + 1 < len(self._microbatches_here)
            structure, tensors = links.inputs.receive(self.step.attempt.number, index, more)
            graph_input = GraphInput(tensors, [meta.requires_grad for meta in links.inputs.metas])
            given = StageInput.from_message(
                structure, graph_input.tensors, links.inputs.rng_state, graph_input
            )
        loss = self._make_loss(stage, microbatch, where) if links.outputs is None else None
        for observer in self.step.observers:
            observer.begin_microbatch()
        with self._parallel.autocast():
            made = stage.forward(self.step.number, index, given, where, loss)
        for observer in self.step.observers:
            for root in made.tensors:
                observer.record_graph(root, (self.step.number, index))
        if links.outputs is not None:
            links.outputs.send(
                made.structure, made.tensors, self.step.attempt.number, index, made.rng_state
            )

    def _make_loss(
        self, stage: Stage, microbatch: Microbatch, where: str
    ) -> Callable[[Any], torch.Tensor]:
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

    def _backward(self, stage: Stage, index: int, kind: str) -> None:
        where = self.where
        if kind == "weight":
            stage.backward_weights(index, where)
            return
        links = self.pipeline.links[stage.number]
        gradients: Sequence[torch.Tensor | None] | None = None
        rng_state: RngState | None = None
        if links.gradients is not None:
            gradients = ()
            if stage.count_outputs(index):
                received = links.gradients.receive(self.step.attempt.number, index)
                gradients = unflatten(*received)
                rng_state = links.gradients.rng_state
        tied = self.pipeline.find_ties_to_later(stage.number)
        tied_roots = [
            pair for tie in tied for pair in tie.receive_gradients(self.step.attempt.number, index)
        ]
        ties_to_earlier = self.pipeline.find_ties_to_earlier(stage.number)
        with disable_hooks([parameter for tie in ties_to_earlier for parameter in tie.parameters]):
            if kind == "input":
                unsplit = self.pipeline.find_tied_parameters(stage.number)
                made, rng_state = stage.backward_inputs(
                    index, gradients, unsplit, tied_roots, rng_state, where
                )
            else:
                made, rng_state = stage.backward(index, gradients, tied_roots, rng_state, where)
        if links.to_inputs is not None and made:
            links.to_inputs.send(*flatten(tuple(made)), self.step.attempt.number, index, rng_state)
        for tie in ties_to_earlier:
            tie.send_gradients(
                stage.take_gradients(index, tie.parameters), self.step.attempt.number, index
            )

    def _finish_microbatch(self, stage: Stage, microbatch: Microbatch) -> None:
        self._skip_absent(stage, microbatch.index)
        self._missing[stage.number].pop(0)
        if self.step.observers:
            gradients = stage.gradients.hash_current
            buffers = stage.buffers.current
            self.step.observe_microbatch(microbatch.index, gradients, buffers)
        with self.step.in_phase("reduction"):
            stage.finish(microbatch.index, microbatch.size / self.step.samples)

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
