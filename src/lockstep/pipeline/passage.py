"""The passage: one step of a pipeline, this rank's part of it.

`trainer.step(batch)` with stages: as `lockstep.model.step`, but the schedule says
what comes when, and several micro-batches are under way at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from lockstep.data.microbatch import Microbatch
from lockstep.data_parallel.gradients import Gradients
from lockstep.errors import LostError, StoppedError
from lockstep.model.attempt import Attempt
from lockstep.model.buffers import Buffers
from lockstep.model.forward import Metric, measured, own_loss, parts
from lockstep.model.ledger import Page
from lockstep.model.parallel_context import Setting
from lockstep.model.turn import Result, Turn
from lockstep.model.watch import Span, Watch
from lockstep.pipeline.aliasing import Arrival
from lockstep.pipeline.boundary import assembled, flattened
from lockstep.pipeline.draws import Draws
from lockstep.pipeline.graph_entry import Entry
from lockstep.pipeline.link import Receiver
from lockstep.pipeline.pipeline import Pipeline
from lockstep.pipeline.schedules import Action
from lockstep.pipeline.stage import Stage, StageInput, first_input
from lockstep.pipeline.tying import without_hooks
from lockstep.randomness import isolated

__all__ = ["Passage"]


class Passage(Turn):
    """One optimizer step in the making, through the stages of this rank."""

    def __init__(
        self,
        attempt: Attempt,
        setting: Setting,
        pipeline: Pipeline,
        metrics: Mapping[str, Metric],
        finish: Callable[[Turn], None],
        watch: Watch | None = None,
    ) -> None:
        super().__init__(attempt, setting, pipeline.side_effects, finish)
        self._watch = watch if watch is not None and watch.sees(attempt.step) else None
        self.pipeline = pipeline
        self.spans: list[Span] = []
        self._stopped = ""
        self._metrics = metrics
        self._microbatches_here: list[Microbatch] = []
        self._shares_of: dict[int, float] = {}
        self._computed = 0
        self._missing: dict[int, list[int]] = {}
        self._doing: tuple[Stage, int] | None = None
        self._waited, self._source, self._bytes = 0.0, -1, 0

    def parts(self) -> list[tuple[Gradients, Buffers]]:
        """Return gradients and buffers of each stage."""
        return [(stage.gradients, stage.buffers) for stage in self.pipeline.stages.values()]

    def train(self, batch: Any) -> None:
        """Take every micro-batch of this replica forward and backward through the stages here."""
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

    def share_tied(self) -> None:
        """Give the sums of parameters that stages share to all of them."""
        self.pipeline.share_tied(self.attempt.number)

    # --- before the first and after the last --------------------------------------------------

    def _seed(self, stack: ExitStack) -> None:
        for stage in self.pipeline.stages.values():
            stage.begin(Buffers(self._modules(stage)))
            stack.enter_context(stage.units.hooked())
            stack.enter_context(stage.recomputation.active(stage.buffers))
        stack.enter_context(isolated(self.setting.device, everything=True))

    def _leave(self, error: BaseException | None) -> bool:
        for stage in self.pipeline.stages.values():
            stage.end()
        return False

    def __exit__(self, *raised: Any) -> None:
        """Finish the step; after a failure the links begin anew."""
        try:
            super().__exit__(*raised)
        except Exception:
            # Whoever failed, and at what: messages of this step may still be under way.
            self.pipeline.connect()
            raise

    def _modules(self, stage: Stage) -> dict[str, Any]:
        found = dict(stage.named)
        if stage.number == self.pipeline.last:
            found |= self.setting.loss_module()
        return found

    def _prepare(self, batch: Any) -> None:
        batch = self._cut(batch)
        self._shares_of, self._computed = self._shares(batch)
        for stage in self.pipeline.stages.values():
            stage.gradients.begin(batch.leaves)
            self._missing[stage.number] = [each.index for each in batch.microbatches]
        self._microbatches_here = [
            each for each in batch.microbatches if each.index in self._shares_of
        ]
        if self._microbatches_here:
            for ends in self.pipeline.ends.values():
                for receiver in (ends.inputs,):
                    if receiver is not None:
                        receiver.post()

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
            autocast = torch.autocast(self.setting.device.type, enabled=False)
            with autocast, stage.recomputation.told():
                self._backward(stage, microbatch.index, action.kind)
            if action.kind != "input":
                self._finish_leaf(stage, microbatch)
        if self._watch is not None:
            self.spans.append(
                (action.kind, stage.number, microbatch.index, begun, time.perf_counter(),
                 self._waited, self._source, self._bytes)
            )  # fmt: skip
        self._doing = None

    def _forward(self, stage: Stage, microbatch: Microbatch, position: int) -> None:
        leaf, ends = microbatch.index, self.pipeline.ends[stage.number]
        place = self.place
        if ends.inputs is None:
            given = first_input(microbatch, self.setting, place)
        else:
            more = position + 1 < len(self._microbatches_here)
            pattern, tensors = self._received(ends.inputs, leaf, more)
            entry = Entry(tensors, [form.differentiable for form in ends.inputs.forms])
            arrival = Arrival.of(pattern, entry.tensors)
            given = StageInput(assembled(pattern, entry.tensors), arrival, ends.inputs.draws, entry)
        loss = self._loss(microbatch, place) if ends.outputs is None else None
        with self.setting.autocast():
            made = stage.forward(self.number, leaf, given, place, loss)
        if ends.outputs is not None:
            ends.outputs.send(made.pattern, made.tensors, self.attempt.number, leaf, made.draws)

    def _loss(self, microbatch: Microbatch, place: str) -> Callable[[Any], torch.Tensor]:
        """Return what makes the scaled loss of the model's outputs, and notes it."""

        def scaled(outputs: Any) -> torch.Tensor:
            metrics: dict[str, Any] = {}
            if self.setting.loss is None:
                loss = own_loss(outputs, place)
            else:
                targets = parts(self.setting.moved(microbatch.data), place)[1]
                loss, metrics = measured(self.setting.loss, self._metrics, outputs, targets, place)
            self._check(loss, place)
            share = self._shares_of[microbatch.index]
            self.results.append(Result(microbatch, share, [loss.detach()], metrics))
            with torch.autocast(self.setting.device.type, enabled=False):
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
        also = [pair for tie in tied for pair in tie.taken(self.attempt.number, leaf)]
        ties_up = self.pipeline.ties_up(stage.number)
        with without_hooks([parameter for tie in ties_up for parameter in tie.parameters]):
            if kind == "input":
                whole = self.pipeline.tied_parameters(stage.number)
                made, draws = stage.backward_inputs(leaf, gradients, whole, also, draws, place)
            else:
                made, draws = stage.backward(leaf, gradients, also, draws, place)
        if ends.to_inputs is not None and made:
            ends.to_inputs.send(*flattened(tuple(made)), self.attempt.number, leaf, draws)
        for tie in ties_up:
            tie.hand_on(stage.taken(leaf, tie.parameters), self.attempt.number, leaf)

    def _finish_leaf(self, stage: Stage, microbatch: Microbatch) -> None:
        self._skip_absent(stage, microbatch.index)
        self._missing[stage.number].pop(0)
        stage.finish(microbatch.index, microbatch.size / self._computed)

    def _received(self, receiver: Receiver, leaf: int, more: bool = False) -> Any:
        begun, before = time.perf_counter(), receiver.received
        try:
            return receiver.receive(self.attempt.number, leaf, more)
        finally:
            waited = time.perf_counter() - begun
            self._waited += waited
            self._idle += waited
            self._source = receiver.peer
            self._bytes += receiver.received - before

    # --- what it says -------------------------------------------------------------------------

    def position(self) -> tuple[int, int] | None:
        """Return the micro-batch and the stage of the action in work."""
        return (self._doing[1], self._doing[0].number) if self._doing else None

    @property
    def place(self) -> str:
        """Where the step is: rank, stage, step and micro-batch, for messages."""
        if self._doing is None:
            return f"rank {self.setting.rank}, step {self.number}"
        stage, leaf = self._doing
        where = f"rank {self.setting.rank}, stage {stage.number}"
        return f"{where}, step {self.number}, micro-batch {leaf}"

    def page(self) -> Page:
        """Return what this rank has to say of its micro-batches, or of its failure."""
        if self._stopped:
            assert self.batch is not None
            batch = self.batch.identity.pack()
            return Page([], [], 0.0, 0.0, stopped=self._stopped, batch=batch)
        page = super().page()
        return self._watch.noted(page, self._begun, self.spans) if self._watch else page

    def _fail(self, error: Exception) -> None:
        """Tell the neighbours; the ledger tells everybody."""
        self.error = error
        if isinstance(error, StoppedError):
            self._stopped = str(error)
        else:
            said = (str(error).splitlines() or [""])[0]
            named = (
                said
                if said.startswith(self.place)
                else f"{self.place}: {type(error).__name__}: {said}"
            )
            self._stopped = named
            error.add_note(f"in {self.place}")
        with suppress(RuntimeError):
            self.pipeline.fail(self._stopped, self.attempt.number)
