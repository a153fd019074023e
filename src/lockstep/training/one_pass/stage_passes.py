"""Several micro-batches of a pipeline stage in one pass, with the bits of a pass for each.

    single passes    what each gets, returns, and adds to gradients is noted and counts
    a trial          after the last of them, all from what was noted: forward, backward, compared
    one pass         forward, whose outputs are cut and sent; backward, when all gradients arrived

A trial needs no other stage, so stages find out separately what they can join. A forward pass is
compared with its plan before anything is sent. If a backward pass is another one, forward and
backward are computed one by one, from the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lockstep.kernel.batch import Microbatch
from lockstep.kernel.step_context import ComputedMicrobatch, StepContext
from lockstep.model.forward import Metric
from lockstep.model.loss_root import LossRoot
from lockstep.model.parallel_context import ParallelContext
from lockstep.pipeline.aliasing import ReceivedTensors, SentTensors
from lockstep.pipeline.grouping import SIZES, is_node
from lockstep.pipeline.joint_passes import (
    GivenInput,
    GivenMessage,
    JointOutputs,
    JointPass,
    OutputGradients,
)
from lockstep.pipeline.p2p import GroupSize, RngState
from lockstep.pipeline.stage import Stage, StageOutput
from lockstep.training.one_pass.call_comparison import CannotJoin, NotedCall
from lockstep.training.one_pass.grouped_passes import PassResults
from lockstep.training.one_pass.joined_rows import (
    StageForward,
    join_inputs,
)
from lockstep.training.one_pass.one_pass import OnePass
from lockstep.training.one_pass.pass_attempt import (
    PassAttempt,
    cut_parts,
    describe_shapes,
    join_gradients,
    make_recorded,
)
from lockstep.training.one_pass.pass_plan import count_bytes
from lockstep.training.one_pass.pass_trial import (
    MOST_BYTES,
    JoinedPass,
    PassKind,
    Trial,
    discard_results,
)
from lockstep.training.one_pass.single_passes import (
    SinglePass,
    SinglePasses,
    describe_gradient,
    name_values,
)

__all__ = ["StagePasses"]

NO_LOSS = torch.empty(0)


# It has many attributes: what a stage computes, and what is noted of its single passes.
class StagePasses(OnePass):
    """Computes several micro-batches of a stage together; as `JointPasses` describes.

    Args:
        parallel: The layout and the loss.
        metrics: Functions of (outputs, targets) by name.
        stage: The stage.
        modules: Its blocks, and the loss in the last stage.
        is_last: Whether it is the last stage.
        obstacle: Why micro-batches are always computed one by one; "" if they are not.

    Attributes:
        is_comparing: Whether single passes have been compared with others, or repeated, in this
            step.
    """

    def __init__(
        self,
        parallel: ParallelContext,
        metrics: Mapping[str, Metric],
        stage: Stage,
        modules: Mapping[str, nn.Module],
        is_last: bool,
        obstacle: str,
    ) -> None:
        called = nn.ModuleList(modules.values())
        super().__init__(parallel, called, modules, metrics, stage.scopes, LossRoot(None))
        self._stage = stage
        self._is_last = is_last
        self._obstacle = obstacle
        self._blocks = [*stage.blocks.values()]
        self._step: Any = None
        self._microbatches = 0
        self._may_try = False
        self.is_comparing = False
        self._used: set[PassKind] = set()  # in this step
        self._due: set[PassKind] = set()  # of which every group is compared in this step
        self._seen: set[Any] = set()  # the shapes of micro-batches in this step
        self._structures: dict[PassKind, str] = {}  # of the outputs
        self._described: tuple[GivenMessage | None, Any] = (None, None)  # the last message
        self._settled: Any = None  # shapes of which no pass is compared in this step
        self._noted = SinglePasses()
        self._state_before_loss = b""
        self._loss_states: list[RngState] = []  # after the loss of each micro-batch
        self._trials: list[tuple[Trial, Sequence[Microbatch]]] = []

    @property
    def loss_modes(self) -> Sequence[bool]:
        """Only that the loss of each micro-batch is computed from its outputs."""
        return [False]

    @property
    def note(self) -> str:
        """Why micro-batches are computed one by one; "" if they are not."""
        return self._obstacle or self.known.note

    def begin(self, step: StepContext, microbatches: int) -> None:
        """Begin a step with a number of micro-batches."""
        self.end()
        for kind in self._used:
            self.known.count_step(kind)
        self._used = set()
        self._due = set()
        self._step = step
        self._microbatches = microbatches
        self.is_comparing = False
        # Audits and other observers watch the calls of blocks, which a trial would repeat.
        self._may_try = not step.observers and not self._has_hooks()
        if self._may_try:
            self._seen = set()

    def end(self) -> None:
        """Forget the micro-batches of a step, also after a failure."""
        self._step = None
        self._settled = None
        self._shapes = {}
        self._noted.clear()
        self._trials = []

    def _is_compared(self, step: StepContext, group: Sequence[Microbatch]) -> bool:
        """Return whether a pass that is known is compared with single ones again."""
        return self.known.is_due(self._kind(group))

    def _describe(self, given: GivenInput) -> Any:
        """Return what has to be alike in the inputs of a pass, and keep it; None: nothing is."""
        shapes = None
        if given.message is not None:
            last, shapes = self._described
            # Messages of one layout refer to the same objects.
            if last is None or given.message.metas is not last.metas:
                shapes = _describe_message(given.message)
                self._described = replace(given.message, tensors=[]), shapes
        elif given.first is not None and not given.first.received.has_aliases:
            shapes = describe_shapes(given.first.data)
            if shapes == self._settled:
                shapes = self._settled
        self._shapes[given.microbatch.index] = shapes
        if shapes is not None and shapes is not self._settled:
            self._seen.add(shapes)
        return shapes

    # --- which micro-batches ---------------------------------------------------------------------

    def count(self, given: GivenInput, following: Sequence[Microbatch]) -> int:
        """Return how many micro-batches are computed together, from the first one's input."""
        shapes = self._describe(given)
        is_noted = self._is_in_trial(given.microbatch)
        if shapes is None or is_noted or self._obstacle or not self._may_try:
            return 1
        for group in self._list_nodes(following):
            kind = PassKind(len(group), shapes)
            if self.known.find(kind) is None:
                continue
            if self._is_compared(self._step, group):
                self._due.add(kind)
                return 1
            return len(group)
        return 1

    def _is_in_trial(self, microbatch: Microbatch) -> bool:
        """Return whether a single pass over a micro-batch is compared with one over several."""
        return any(part is microbatch for _, group in self._trials for part in group)

    def _list_nodes(self, following: Sequence[Microbatch]) -> list[Sequence[Microbatch]]:
        """Return the groups that begin with a micro-batch, the largest first."""
        most = min(len(following), self._microbatches // 2)
        indices = [part.index for part in following[: SIZES[-1]]]
        sizes = [size for size in SIZES if size <= most and is_node(indices[:size], size)]
        return [following[:size] for size in reversed(sizes)]

    def report(self, count_in_flight: Callable[[int], int]) -> GroupSize:
        """Return the largest group for which the stage has memory, and which it has joined."""
        sizes = [self.known.find_bytes(shapes) for shapes in self._seen]
        if not sizes or None in sizes:
            return GroupSize()
        largest = max(size for size in sizes if size is not None)
        single = count_in_flight(1)
        fitting = 1
        joined = 1
        for size in SIZES:
            more = size * count_in_flight(size) - single
            if max(more, size) * largest > MOST_BYTES:
                break
            fitting = size
            if any(self.known.find(PassKind(size, shapes)) for shapes in self._seen):
                joined = size
        return GroupSize(fitting, joined)

    # --- a joint pass ----------------------------------------------------------------------------

    def forward(self, given: Sequence[GivenInput]) -> JointPass | None:
        """Compute the outputs of micro-batches together; None: they are computed one by one."""
        group = [one.microbatch for one in given]
        shapes = [self._describe(one) for one in given]
        kind = PassKind(len(group), shapes[0])
        joined = self.known.find(kind)
        is_alike = shapes.count(shapes[0]) == len(shapes)
        if joined is None or not is_alike or any(map(self._is_in_trial, group)):
            return None
        if self._is_compared(self._step, group):
            self._due.add(kind)
            return None
        stage = self._stage
        attempt = joined.attempt(self._step, stage.buffers, group)
        try:
            made = self._run_forward(attempt, given, is_trial=False)
            joined.require_same_forward()
            joined.require_written(attempt.list_written())
            if made.structure != self._structures[kind]:
                raise CannotJoin("a block returns another value than in the first step")
        except Exception as error:
            self._give_up(attempt, joined, error)
            return None
        self._used.add(kind)
        made.assigned = stage.inspector.state.get_assigned()
        made.buffers = stage.leave()
        return JointPass(
            given,
            made.made,
            attempt.buffers_after,
            0 if self._is_last else len(made.outputs),
            (attempt, joined, made),
        )

    def backward(
        self, joint: JointPass, gradients: Sequence[OutputGradients]
    ) -> list[list[torch.Tensor | None]] | None:
        """Return the gradients of the inputs of each micro-batch; None: repeat them one by one."""
        attempt, joined, made = joint.state
        where = joint.given[0].where
        made.sent.check(where)
        try:
            joined.backward.restart()
            with self._stage.return_to(made.buffers, made.assigned, where):
                found = self._run_backward(attempt, made, gradients)
            joined.require_same_backward()
        except Exception as error:  # one that is not ours is raised again by single passes
            self._give_up(attempt, joined, error)
            return None
        return found

    def _give_up(self, attempt: PassAttempt, joined: JoinedPass, error: Exception) -> None:
        """Discard a pass that has failed, and plan it again."""
        self.is_comparing = True
        if self.known.find(self._kind(attempt.group)) is joined:
            self.forget(attempt, error)
        else:  # another group was the first to fail
            discard_results(self._parameters, attempt.buffers)
        self._stage.leave()

    def _run_forward(
        self, attempt: PassAttempt, given: Sequence[GivenInput], *, is_trial: bool
    ) -> StageForward:
        """Compute the outputs of micro-batches together, and in the last stage their losses.

        Raises:
            CannotJoin: They have to be computed one by one.
        """
        inspector = self._stage.inspector
        where = given[0].where
        last_call = given[0].rng_state.last_call
        if any(one.rng_state.last_call != last_call for one in given):
            raise CannotJoin("earlier stages have called a block differently often")
        data, graph_input = join_inputs(given)
        attempt.note_samples(data)
        state = self.begin_forward(attempt, last_call)
        if is_trial:
            value = attempt.forward.run(lambda: inspector.call_in_turn(self._blocks, data, where))
        else:
            value = inspector.call_blocks(self._blocks, data, where, attempt.forward.run)
        self.end_forward(attempt, state)
        last_call = self._scopes.last_call
        if self._is_last:
            attempt.note_outputs(value)
            made = self._compute_losses(attempt, value, last_call)
        else:
            made = self._make_outputs(attempt, given, value, last_call)
        made.graph_input = graph_input
        return made

    def _make_outputs(
        self, attempt: PassAttempt, given: Sequence[GivenInput], value: Any, last_call: int
    ) -> StageForward:
        """Return the outputs of each micro-batch.

        Raises:
            CannotJoin: They cannot be cut.
        """
        where = given[0].where
        inspector = self._stage.inspector
        nothing = ReceivedTensors((), ())
        structure, tensors = inspector.flatten_output(value, self._blocks, nothing, where)
        if structure[0] == "&":
            raise CannotJoin("outputs of the stage share memory")
        attempt.note_order(tensors)
        cuts = [cut_parts(tensor, len(given)) for tensor in tensors]
        rng_state = RngState(last_call)
        outputs = [
            StageOutput(structure, [cut[number] for cut in cuts], rng_state)
            for number in range(len(given))
        ]
        return StageForward(
            [tensor for tensor in tensors if tensor.requires_grad],
            None,
            SentTensors(tensors),
            JointOutputs([rng_state] * len(given), outputs),
            repr(structure),
        )

    def _compute_losses(self, attempt: PassAttempt, outputs: Any, last_call: int) -> StageForward:
        """Compute the losses from the outputs of the model, and the gradients of these."""
        results = PassResults([], [], attempt.buffers_after)
        self._loss_states = []
        used = self.differentiate_losses(attempt, results, outputs, last_call)
        shares = attempt.step.shares
        computed = [
            ComputedMicrobatch(part, shares[part.index], [loss], metrics)
            for part, loss, metrics in zip(
                attempt.group, results.losses, results.metrics, strict=True
            )
        ]
        return StageForward(
            [output for output, _ in used],
            [gradient for _, gradient in used],
            SentTensors(()),
            JointOutputs(self._loss_states, computed=computed),
        )

    def _run_backward(
        self, attempt: PassAttempt, made: StageForward, gradients: Sequence[OutputGradients]
    ) -> list[list[torch.Tensor | None]]:
        """Return the gradients of the inputs of each micro-batch.

        Raises:
            CannotJoin: They have to be computed one by one.
        """
        segments = len(attempt.group)
        if made.gradients is not None:
            used = [*zip(made.outputs, made.gradients, strict=True)]
        else:
            columns = zip(*(one.tensors or () for one in gradients), strict=True)
            pairs = zip(made.outputs, map(join_gradients, columns), strict=False)
            used = [(output, gradient) for output, gradient in pairs if gradient is not None]
        self.run_from_outputs(attempt, used)
        found = [] if made.graph_input is None else made.graph_input.gradients
        cuts = [[None] * segments if one is None else cut_parts(one, segments) for one in found]
        return [[cut[number] for cut in cuts] for number in range(segments)]

    # --- what is noted of single passes ----------------------------------------------------------

    def note_input(self, given: GivenInput, following: Sequence[Microbatch]) -> None:
        """Note the input of a single pass; `following` are this micro-batch and those after it."""
        if not self._may_try:
            return
        shapes = self._describe(given)
        for trial, group in [*self._trials]:
            is_member = any(part is given.microbatch for part in group)
            if is_member and shapes != self._shapes[group[0].index]:
                self._trials.remove((trial, group))
                self.known.withdraw_trial(self._kind(group))
        if shapes is not None and shapes is self._settled and not self._trials:
            return
        is_measured = self._obstacle and self.known.find_bytes(shapes) is None
        if shapes is not None and not self._obstacle:
            self._open_trials(following)
        if is_measured or self._is_in_trial(given.microbatch):
            self._noted.open(given)

    def _open_trials(self, following: Sequence[Microbatch]) -> None:
        """Begin the trials that are due of the groups that begin with a micro-batch."""
        groups = self._list_nodes(following)
        for group in groups:
            kind = PassKind(len(group), self._shapes[group[0].index])
            is_due = kind not in self._used or kind in self._due
            if not is_due or not self.known.fits(kind):
                continue
            trial = self.begin_trial(self._step, self._stage.buffers, group)
            if trial is not None:
                trial.words = "{}"
                self._used.add(kind)
                self._trials.append((trial, group))
        if not self._trials and len(groups) == sum(
            2 * size <= self._microbatches for size in SIZES
        ):
            self._settled = self._shapes[following[0].index]

    def note_output(self, index: int, made: StageOutput) -> None:
        """Note the output of a single pass, unless it is a loss."""
        self._noted.note_output(index, made)

    def note_gradients(self, index: int, gradients: OutputGradients) -> None:
        """Note the gradients of its output."""
        self._noted.note_gradients(index, gradients)

    def note_input_gradients(self, index: int, made: Sequence[torch.Tensor | None]) -> None:
        """Note the gradients of its input."""
        self._noted.note_input_gradients(index, made)

    def note_parameters(self, index: int, computed: Sequence[ComputedMicrobatch]) -> None:
        """Note the gradients in `.grad` after a single pass, and its loss, if it has one."""
        for trial, group in self._trials:
            if any(part.index == index for part in group):
                noted = self._noted[index]
                own = [one for one in computed if one.microbatch.index == index]
                loss = own[0].losses[0] if own else NO_LOSS
                metrics = own[0].metrics if own else {}
                values = name_values(noted.outputs, noted.made, metrics)
                trial.note(loss, values, self._stage.gradients.hash_node)

    def compare(self, index: int) -> None:
        """Compare single passes with one, after the last of them is complete."""
        ended = [(trial, group) for trial, group in self._trials if group[-1].index == index]
        for trial, group in ended:
            trial.finish()
            self._trials.remove((trial, group))
        noted = self._noted.find(index)
        is_measured = noted is not None and self.known.find_bytes(self._shapes[index]) is None
        if noted is not None and is_measured and (ended or self._obstacle):
            self._measure(noted)
        if ended or is_measured:
            self.is_comparing = True
            self._stage.leave()
            self._stage.inspector.state.hold()  # what blocks fill for other sizes is no change
        if not self._trials:
            self._noted.clear()

    def _measure(self, noted: SinglePass) -> None:
        """Find out how many bytes a micro-batch keeps that is never computed with others."""
        group = [noted.given.microbatch]
        passes = [
            make_recorded(restores=True, keeps=False, joins_losses=False, first=None)
            for _ in range(2)
        ]
        attempt = PassAttempt(self._step, self._stage.buffers, group, *passes)
        self.perform(attempt)
        discard_results(self._parameters, attempt.buffers)
        calls = [NotedCall(*call) for call in passes[0].recorded.calls]
        self.known.set_bytes(self._shapes[group[0].index], count_bytes(calls))

    def _compute(self, attempt: PassAttempt) -> PassResults:
        """Compute micro-batches together, from what was noted.

        Raises:
            CannotJoin: They have to be computed one by one, or a result has another layout.
        """
        noted = [self._noted[part.index] for part in attempt.group]
        made = self._run_forward(attempt, [one.given for one in noted], is_trial=True)
        outputs = [output.tensors for output in made.made.outputs] or [[] for _ in noted]
        for tensors, one in zip(outputs, noted, strict=True):
            if made.structure != one.structure or not one.has_layouts(tensors):
                raise CannotJoin("an output has another layout for several micro-batches")
        self._structures[self._kind(attempt.group)] = made.structure
        found = self._run_backward(attempt, made, [one.gradients for one in noted])
        for gradients, one in zip(found, noted, strict=True):
            if [*map(describe_gradient, gradients)] != one.made_metas:
                raise CannotJoin(
                    "the gradient of an input has another layout for several micro-batches"
                )
        computed = made.made.computed
        metrics = [one.metrics for one in computed] or [{} for _ in noted]
        losses = [one.losses[0] for one in computed] or [NO_LOSS] * len(noted)
        values = [*map(name_values, outputs, found, metrics)]
        return PassResults(losses, values, attempt.buffers_after)

    def _begin_loss(self, step: StepContext, part: Microbatch, last_call: int) -> str:
        where = super()._begin_loss(step, part, last_call)
        self._state_before_loss = self._stage.read_rng_state()
        return where

    def _compute_loss(
        self, step: StepContext, part: Microbatch, outputs: Any, last_call: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        computed = super()._compute_loss(step, part, outputs, last_call)
        state = self._stage.update_rng_state(self._state_before_loss, RngState(last_call))
        self._loss_states.append(state)
        return computed


def _describe_message(message: GivenMessage) -> Any:
    """Return what has to be alike in messages that are joined; None: nothing is enough."""
    is_plain = message.structure[0] != "&" and not any(
        meta.offset or meta.conjugated or meta.negated or not meta.shape for meta in message.metas
    )
    # As text, in which 0.0 is not -0.0.
    return (repr(message.structure), tuple(message.metas)) if is_plain else None
