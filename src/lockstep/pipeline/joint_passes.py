"""The requests of a schedule to passes of a stage over several micro-batches.

    given            the inputs of a micro-batch, as they arrived
    joint pass       the outputs of several, and later the gradients of their inputs
    notes            what single passes got and returned, with which a joint pass is compared

Messages stay those of single micro-batches, so no other stage notices. What computes such passes,
and finds out whether they have the bits of single ones, is
`lockstep.training.one_pass.stage_passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lockstep.data.microbatch import Microbatch
from lockstep.kernel.step_context import ComputedMicrobatch, StepContext
from lockstep.pipeline.boundary import Structure, TensorMeta
from lockstep.pipeline.p2p import INITIAL_RNG_STATE, GroupSize, RngState
from lockstep.pipeline.split_backward import GraphInput
from lockstep.pipeline.stage import StageInput, StageOutput

__all__ = [
    "GivenInput",
    "GivenMessage",
    "JointOutputs",
    "JointPass",
    "JointPasses",
    "OutputGradients",
]


@dataclass
class GivenMessage:
    """The message of the previous stage.

    Attributes:
        structure: The structure of the value.
        tensors: Its tensors.
        metas: Their layouts on the sender.
    """

    structure: Structure
    tensors: list[torch.Tensor]
    metas: list[TensorMeta]


@dataclass
class GivenInput:
    """What a stage got for a micro-batch, before a graph begins with it.

    Attributes:
        microbatch: The micro-batch.
        where: Rank, stage, step and micro-batch, for messages.
        first: The input of the first stage; None in others.
        message: The message of the previous stage; None in the first one.
        rng_state: The random state after the earlier stages.
    """

    microbatch: Microbatch
    where: str
    first: StageInput | None = None
    message: GivenMessage | None = None
    rng_state: RngState = INITIAL_RNG_STATE

    def enter(self) -> StageInput:
        """Return the input of a single pass, with which a graph begins."""
        if self.message is None:
            assert self.first is not None
            return self.first
        message = self.message
        graph_input = GraphInput(message.tensors, [meta.requires_grad for meta in message.metas])
        return StageInput.from_message(
            message.structure, graph_input.tensors, self.rng_state, graph_input
        )


@dataclass
class OutputGradients:
    """The gradients of the outputs of a micro-batch.

    Attributes:
        tensors: One per output that requires a gradient, or None for it; None after a loss.
        rng_state: The random state after the backward of later stages; None after a loss, or if
            no gradients were received.
    """

    tensors: Sequence[torch.Tensor | None] | None = None
    rng_state: RngState | None = None


@dataclass
class JointOutputs:
    """The results of the forward of several micro-batches.

    Attributes:
        rng_states: The random states after each of them.
        outputs: The output for each of them; empty in the last stage.
        computed: The losses of the last stage; empty in other stages.
    """

    rng_states: list[RngState]
    outputs: list[StageOutput] = field(default_factory=list)
    computed: list[ComputedMicrobatch] = field(default_factory=list)


@dataclass
class JointPass:
    """A pass over several micro-batches between its forward and its backward.

    Attributes:
        given: What the stage got for each of them.
        made: The results of its forward.
        buffers: The buffers after each of them.
        count: The number of outputs that require a gradient; 0 in the last stage.
        state: What its backward needs.
    """

    given: Sequence[GivenInput]
    made: JointOutputs
    buffers: list[list[torch.Tensor]]
    count: int
    state: Any


class JointPasses(Protocol):
    """Computes several micro-batches of a stage together."""

    @property
    def is_comparing(self) -> bool:
        """Whether single passes have been compared with others, or repeated, in this step."""

    @property
    def note(self) -> str:
        """Why micro-batches are computed one by one; "" if they are not."""

    def begin(self, step: StepContext, microbatches: int) -> None:
        """Begin a step with a number of micro-batches."""

    def end(self) -> None:
        """End a step, also after a failure."""

    def count(self, given: GivenInput, following: Sequence[Microbatch]) -> int:
        """Return how many micro-batches are computed together.

        Args:
            given: The first one.
            following: This one and those after it that may be.
        """

    def forward(self, given: Sequence[GivenInput]) -> JointPass | None:
        """Compute the outputs of micro-batches together; None: they are computed one by one."""

    def backward(
        self, joint: JointPass, gradients: Sequence[OutputGradients]
    ) -> list[list[torch.Tensor | None]] | None:
        """Return the gradients of the inputs of each micro-batch; parameters have theirs.

        None: forward and backward have to be computed one by one.
        """

    def note_input(self, given: GivenInput, following: Sequence[Microbatch]) -> None:
        """Note the input of a single pass; `following` are this micro-batch and those after it."""

    def note_output(self, index: int, made: StageOutput) -> None:
        """Note its output, unless it is a loss."""

    def note_gradients(self, index: int, gradients: OutputGradients) -> None:
        """Note the gradients of its output."""

    def note_input_gradients(self, index: int, made: Sequence[torch.Tensor | None]) -> None:
        """Note the gradients of its input."""

    def note_parameters(self, index: int, computed: Sequence[ComputedMicrobatch]) -> None:
        """Note the gradients in `.grad` of a micro-batch, and its loss, if it has one.

        Args:
            index: Its index.
            computed: The losses of all micro-batches so far; empty before the last stage.
        """

    def compare(self, index: int) -> None:
        """Compare single passes with one, after the micro-batch is complete."""

    def report(self, count_in_flight: Callable[[int], int]) -> GroupSize:
        """Return the largest group for which the stage has memory, and which it has joined.

        Args:
            count_in_flight: Returns how many groups of a size the stage holds at a time.
        """
