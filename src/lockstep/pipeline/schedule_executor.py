"""The schedule executor: one step through the pipeline stages of this rank.

The schedule determines the order of actions; several micro-batches are in flight. An action of a
group of micro-batches (`lockstep.pipeline.grouping`) is computed in one pass where this is known to
have the bits of single passes, and otherwise for one micro-batch after another. An exception in a
stage stops the step on every rank: the neighbors receive it at once, the other ranks receive it
with the status of this rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
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
from lockstep.pipeline.grouping import divide_into_groups
from lockstep.pipeline.joint_passes import (
    GivenInput,
    GivenMessage,
    JointPass,
    JointPasses,
    OutputGradients,
)
from lockstep.pipeline.p2p import GroupSize, LinkError, RngState
from lockstep.pipeline.pipeline import Pipeline
from lockstep.pipeline.schedules import Action
from lockstep.pipeline.stage import Stage, StageBuffers, StageOutput, make_first_input
from lockstep.pipeline.tied_weights import disable_hooks

__all__ = ["ScheduleExecutor"]


# It has many attributes: what a step is computed with, and where it is.
class ScheduleExecutor:
    """Computes one step on the stages of this rank; `composition` is checked before, if given.

    `passes` computes several micro-batches of a stage together, by the number of the stage.
    """

    def __init__(
        self,
        step: StepContext,
        pipeline: Pipeline,
        metrics: Mapping[str, Metric],
        composition: Composition | None,
        passes: Mapping[int, JointPasses],
    ) -> None:
        self.step = step
        self._passes = passes
        self._group_size = 1
        self._begun: GivenInput | None = None  # the first message, which says the group size
        self._joint: dict[tuple[int, int], JointPass] = {}  # by stage and first micro-batch
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
                for passes in self._passes.values():
                    passes.end()
                self._joint = {}

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
            if self._microbatches_here:
                self._compute_groups()
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

    # --- the groups of a step -----------------------------------------------------------------

    def _compute_groups(self) -> None:
        """Execute the actions of this rank on groups of the size that the first rank chooses."""
        begun = time.perf_counter()
        count = len(self._microbatches_here)
        sizes = self.pipeline.group_sizes
        samples = self.step.samples
        for passes in self._passes.values():
            passes.begin(self.step, count)
        if self._parallel.position == 0:
            is_alone = not self._passes or bool(self.step.observers)
            self._group_size = 1 if is_alone else sizes.choose(count, samples)
        else:
            stage = min(self.pipeline.stages)
            self._begun = self._receive_input(self.pipeline.stages[stage], 0)
            inputs = self.pipeline.links[stage].inputs
            assert inputs is not None
            self._group_size = inputs.group_size.size
        groups = divide_into_groups(self._indices_here, self._group_size)
        for action in self.pipeline.get_actions(len(groups), self._group_size):
            self._execute(action, groups[action.microbatch])
        if self._parallel.position == 0 and self._passes:
            sizes.limits = self._find_limits(min(self.pipeline.stages))
            comparing = any(passes.is_comparing for passes in self._passes.values())
            if not comparing and not self.step.observers:
                sizes.note(count, samples, self._group_size, time.perf_counter() - begun)

    @property
    def _indices_here(self) -> list[int]:
        return [part.index for part in self._microbatches_here]

    def _find_limits(self, stage: int) -> GroupSize:
        """Return the sizes of groups that a stage and the later ones allow, and have joined."""
        passes = self._passes.get(stage)
        if passes is None:
            return GroupSize()
        count = partial(self.pipeline.count_in_flight, stage, self._indices_here)
        own = passes.report(count)
        links = self.pipeline.links[stage]
        if links.gradients is None:
            return own
        later = links.gradients.group_size
        return GroupSize(min(own.size, later.size), max(own.joined, later.joined))

    def _execute(self, action: Action, group: range) -> None:
        """Execute an action for the micro-batches at some positions."""
        stage = self.pipeline.stages[action.stage]
        if action.kind == "forward":
            self._forward_group(stage, group)
        else:
            with self._parallel.without_autocast(), stage.checkpointing.explain_errors():
                self._backward_group(stage, group, action.kind)
        self._current = None

    def _forward_group(self, stage: Stage, group: range) -> None:
        passes = self._passes.get(stage.number)
        at = group.start
        while at < group.stop:
            given = [self._receive_input(stage, at)]
            following = self._microbatches_here[at : group.stop]
            count = 1 if passes is None or len(group) == 1 else passes.count(given[0], following)
            if passes is None or count == 1:
                self._forward(stage, given[0], at)
            else:
                given += [self._receive_input(stage, at + more) for more in range(1, count)]
                self._forward_together(stage, passes, given, at)
            at += count

    def _forward_together(
        self, stage: Stage, passes: JointPasses, given: Sequence[GivenInput], position: int
    ) -> None:
        """Compute micro-batches in one pass, or their halves."""
        if len(given) == 1:
            self._forward(stage, given[0], position)
            return
        self._current = stage, given[0].microbatch.index
        joint = passes.forward(given)
        if joint is None:
            half = len(given) // 2
            self._forward_together(stage, passes, given[:half], position)
            self._forward_together(stage, passes, given[half:], position + half)
            return
        self.step.computed += joint.made.computed
        self._joint[stage.number, given[0].microbatch.index] = joint
        for one, made in zip(given, joint.made.outputs, strict=False):
            self._send_output(stage, one.microbatch.index, made)

    def _backward_group(self, stage: Stage, group: range, kind: str) -> None:
        at = group.start
        while at < group.stop:
            microbatch = self._microbatches_here[at]
            joint = self._joint.pop((stage.number, microbatch.index), None)
            if joint is not None:
                self._backward_together(stage, joint)
                at += len(joint.given)
                continue
            self._current = stage, microbatch.index
            if kind == "weight":
                stage.backward_weights(microbatch.index, self.where)
            else:
                outputs = stage.count_outputs(microbatch.index)
                gradients = self._receive_gradients(stage, microbatch.index, outputs)
                self._backward(stage, microbatch.index, kind, gradients)
            if kind != "input":
                self._finish_microbatch(stage, microbatch)
            at += 1

    def _backward_together(self, stage: Stage, joint: JointPass) -> None:
        gradients = []
        for given in joint.given:
            self._current = stage, given.microbatch.index
            gradients.append(self._receive_gradients(stage, given.microbatch.index, joint.count))
        made = self._passes[stage.number].backward(joint, gradients)
        if made is None:
            self._repeat_one_by_one(stage, joint, gradients)
            return
        for number, (given, received) in enumerate(zip(joint.given, gradients, strict=True)):
            state = received.rng_state or joint.made.rng_states[number]
            self._send_input_gradients(stage, given.microbatch.index, made[number], state)
        indices = [given.microbatch.index for given in joint.given]
        self._skip_absent(stage, indices[0])
        del self._missing[stage.number][: len(indices)]
        shares = [given.microbatch.size / self.step.samples for given in joint.given]
        with self.step.in_phase("reduction"):
            stage.finish_node(indices, shares, joint.buffers)

    def _repeat_one_by_one(
        self, stage: Stage, joint: JointPass, gradients: Sequence[OutputGradients]
    ) -> None:
        """Compute forward and backward of micro-batches that were sent to the next stage."""
        links = self.pipeline.links[stage.number]
        for given in joint.given:
            index = given.microbatch.index
            self._current = stage, index
            loss = None
            if links.outputs is None:
                loss = self._make_loss(stage, given.microbatch, self.where, is_repeated=True)
            with self._parallel.autocast():
                stage.forward(self.step.number, index, given.enter(), self.where, loss)
        for given, received in zip(joint.given, gradients, strict=True):
            self._current = stage, given.microbatch.index
            self._backward(stage, given.microbatch.index, "backward", received)
            self._finish_microbatch(stage, given.microbatch)

    # --- one action of a micro-batch ----------------------------------------------------------

    def _receive_input(self, stage: Stage, position: int) -> GivenInput:
        """Return what a stage gets for the micro-batch at a position."""
        if self._begun is not None:
            given = self._begun
            self._begun = None
            return given
        microbatch = self._microbatches_here[position]
        index = microbatch.index
        self._current = stage, index
        links = self.pipeline.links[stage.number]
        where = self.where
        if links.inputs is None:
            first = make_first_input(microbatch, self._parallel, where)
            return GivenInput(microbatch, where, first)
        more = position + 1 < len(self._microbatches_here)
        structure, tensors = links.inputs.receive(self.step.attempt.number, index, more)
        message = GivenMessage(structure, tensors, links.inputs.metas)
        return GivenInput(microbatch, where, message=message, rng_state=links.inputs.rng_state)

    def _forward(self, stage: Stage, given: GivenInput, position: int) -> None:
        microbatch = given.microbatch
        index = microbatch.index
        self._current = stage, index
        links = self.pipeline.links[stage.number]
        passes = self._passes.get(stage.number)
        where = self.where
        if passes is not None:
            passes.note_input(given, self._microbatches_here[position:])
        loss = self._make_loss(stage, microbatch, where) if links.outputs is None else None
        for observer in self.step.observers:
            observer.begin_microbatch()
        with self._parallel.autocast():
            made = stage.forward(self.step.number, index, given.enter(), where, loss)
        for observer in self.step.observers:
            for root in made.tensors:
                observer.record_graph(root, (self.step.number, index))
        if links.outputs is not None:
            if passes is not None:
                passes.note_output(index, made)
            self._send_output(stage, index, made)

    def _send_output(self, stage: Stage, index: int, made: StageOutput) -> None:
        outputs = self.pipeline.links[stage.number].outputs
        assert outputs is not None
        outputs.send(
            made.structure,
            made.tensors,
            self.step.attempt.number,
            index,
            made.rng_state,
            GroupSize(self._group_size),
        )

    def _make_loss(
        self, stage: Stage, microbatch: Microbatch, where: str, *, is_repeated: bool = False
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
            if not is_repeated:
                self.step.computed.append(computed)
            with self._parallel.without_autocast():
                return scale_loss(loss, share, self._parallel.loss_scale)

        return scaled

    def _receive_gradients(self, stage: Stage, index: int, outputs: int) -> OutputGradients:
        """Return the gradients of a number of outputs of a micro-batch."""
        links = self.pipeline.links[stage.number]
        if links.gradients is None:
            return OutputGradients()
        if not outputs:
            return OutputGradients(())
        received = links.gradients.receive(self.step.attempt.number, index)
        return OutputGradients(unflatten(*received), links.gradients.rng_state)

    def _backward(self, stage: Stage, index: int, kind: str, gradients: OutputGradients) -> None:
        where = self.where
        passes = self._passes.get(stage.number)
        if passes is not None:
            passes.note_gradients(index, gradients)
        tied = self.pipeline.find_ties_to_later(stage.number)
        tied_roots = [
            pair for tie in tied for pair in tie.receive_gradients(self.step.attempt.number, index)
        ]
        ties_to_earlier = self.pipeline.find_ties_to_earlier(stage.number)
        with disable_hooks([parameter for tie in ties_to_earlier for parameter in tie.parameters]):
            if kind == "input":
                unsplit = self.pipeline.find_tied_parameters(stage.number)
                made, rng_state = stage.backward_inputs(
                    index, gradients.tensors, unsplit, tied_roots, gradients.rng_state, where
                )
            else:
                made, rng_state = stage.backward(
                    index, gradients.tensors, tied_roots, gradients.rng_state, where
                )
        if passes is not None:
            passes.note_input_gradients(index, made)
        self._send_input_gradients(stage, index, made, rng_state)
        for tie in ties_to_earlier:
            tie.send_gradients(
                stage.take_gradients(index, tie.parameters), self.step.attempt.number, index
            )

    def _send_input_gradients(
        self,
        stage: Stage,
        index: int,
        made: Sequence[torch.Tensor | None],
        rng_state: RngState,
    ) -> None:
        links = self.pipeline.links[stage.number]
        if links.to_inputs is None or not made:
            return
        is_last = index == self._microbatches_here[-1].index
        limits = self._find_limits(stage.number) if is_last else GroupSize()
        attempt = self.step.attempt.number
        links.to_inputs.send(*flatten(tuple(made)), attempt, index, rng_state, limits)

    def _finish_microbatch(self, stage: Stage, microbatch: Microbatch) -> None:
        index = microbatch.index
        passes = self._passes.get(stage.number)
        self._skip_absent(stage, index)
        self._missing[stage.number].pop(0)
        if passes is not None:
            is_last = self.pipeline.links[stage.number].outputs is None
            passes.note_parameters(index, self.step.computed if is_last else ())
        if self.step.observers:
            gradients = stage.gradients.hash_current
            buffers = stage.buffers.current
            self.step.observe_microbatch(index, gradients, buffers)
        with self.step.in_phase("reduction"):
            stage.finish(index, microbatch.size / self.step.samples)
        if passes is not None:
            passes.compare(index)

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
