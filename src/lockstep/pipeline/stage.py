"""A stage: contiguous blocks of the model on one rank, forward and backward.

    forward of m    fresh buffers, generators seeded with (seed, step, m), the blocks in turn;
                    the state for the backward is kept in an `InFlightMicrobatch`
    backward of m   the buffers and seeds of m again (a recomputation writes and draws too),
                    torch's generators as the backward of the later stages left them,
                    gradients of the outputs in, gradients of the inputs out
    after it        gradients become leaf m of the tree, buffers are set aside

Several micro-batches may be in flight. The backward runs as a whole, or split in two parts
(`lockstep.pipeline.split_backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lockstep.data.microbatch import Microbatch, clone_tensors, map_tensors
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import LayoutError
from lockstep.kernel.rng_scopes import RngScopes, ScopeCalls
from lockstep.model.activation_checkpointing import ActivationCheckpointing
from lockstep.model.deferred_init import make_released
from lockstep.model.forward import split_targets
from lockstep.model.generator_states import set_state_of_torch, state_of_torch
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.python_state import Assigned, PythonState
from lockstep.model.watched_calls import BeginCall, EndCall
from lockstep.pipeline.aliasing import ReceivedTensors, SentTensors
from lockstep.pipeline.boundary import Structure, unflatten
from lockstep.pipeline.inspection import BlockInspector
from lockstep.pipeline.p2p import INITIAL_RNG_STATE, RngState
from lockstep.pipeline.split_backward import GraphInput, SplitBackward, is_splittable

__all__ = ["Stage", "StageBuffers", "StageInput", "StageOutput", "make_first_input"]

Loss = Callable[[Any], torch.Tensor]
"""A function that computes the scaled loss of the micro-batch from the model's outputs."""

TiedRoots = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, other than the outputs, at which backward starts, with their gradients."""


@dataclass
class StageInput:
    """The input of a stage for one micro-batch.

    Attributes:
        data: The arguments of the first block: in the first stage as `call_model` accepts them,
            in later stages one value.
        received: The tensors in the data.
        rng_state: The random state after the earlier stages.
        graph_input: The input of the autograd graph; None in the first stage and in evaluation.
    """

    data: Any
    received: ReceivedTensors
    rng_state: RngState = INITIAL_RNG_STATE
    graph_input: GraphInput | None = None

    @classmethod
    def from_message(
        cls,
        structure: Structure,
        tensors: Sequence[torch.Tensor],
        rng_state: RngState,
        graph_input: GraphInput | None = None,
    ) -> StageInput:
        """Return the input that the previous stage has sent."""
        received = ReceivedTensors.from_structure(structure, tensors)
        return cls(unflatten(structure, tensors), received, rng_state, graph_input)


def make_first_input(microbatch: Microbatch, parallel: ParallelContext, where: str) -> StageInput:
    """Return the input of the first stage: a micro-batch without its targets."""
    data = parallel.move_to_device(microbatch.data)
    if parallel.loss is None:
        return StageInput(data, ReceivedTensors((), ()))
    inputs, targets = split_targets(data, where)
    return StageInput(inputs, ReceivedTensors.from_batch(_tensors_in(inputs), _tensors_in(targets)))


def _tensors_in(data: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(keep, data)
    return tensors


@dataclass
class StageOutput:
    """The output of a stage for one micro-batch: a flattened value, and the random state."""

    structure: Structure
    tensors: list[torch.Tensor]
    rng_state: RngState


PausedBuffers = list[tuple[torch.Tensor | None, torch.Tensor | None]]
"""For each buffer, its value in a paused micro-batch, and the copy that was installed."""


class StageBuffers(Buffers):
    """The buffers of one stage, which can be put aside."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(modules)
        self._hidden: list[torch.Tensor] = []

    def pause(self) -> PausedBuffers:
        """Remove and return the buffers of the current micro-batch, so that another can start."""
        paused: PausedBuffers = []
        for slot in self.slots:
            module, name = slot.registrations[0]
            paused.append((module._buffers[name], slot.copy))
            slot.copy = None
        self.restore()
        return paused

    def resume(self, paused: PausedBuffers) -> None:
        """Install the buffers that `pause` returned."""
        for slot, (tensor, copy) in zip(self.slots, paused, strict=True):
            slot.copy = copy
            slot.install(tensor)

    def hide(self) -> None:
        """Install tensors that blocks of another stage cannot read, until the next micro-batch."""
        if not self._hidden:
            self._hidden = [make_released(slot.tensor, slot.name) for slot in self.slots]
        for slot, hidden in zip(self.slots, self._hidden, strict=True):
            slot.install(hidden)


@dataclass
class InFlightMicrobatch:
    """The state of a micro-batch between its forward and its backward on one stage."""

    graph_input: GraphInput | None
    outputs: list[torch.Tensor]
    sent: SentTensors
    buffers: PausedBuffers
    calls: ScopeCalls | None
    rng_state: RngState
    assigned: list[Assigned]
    split: SplitBackward | None = None
    early: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)


class Stage:
    """Stage `number` of the model, on this rank.

    Args:
        number: The number of the stage, in model order; the last stage computes the loss.
        blocks: The blocks, in order, by their names in the model.
        scopes: The RNG scopes, which seed the blocks.
        gradients: The reducer of the gradients of the parameters that this stage owns.
        checkpointing: The activation checkpointing of its blocks.
        device: The device.
        state: The Python state of its blocks.
        shares_rank: Whether other stages are on this rank, too.
    """

    def __init__(
        self,
        number: int,
        blocks: Mapping[str, nn.Module],
        scopes: RngScopes,
        gradients: GradientReducer,
        checkpointing: ActivationCheckpointing,
        device: torch.device,
        state: PythonState,
        shares_rank: bool,
    ) -> None:
        self.number = number
        self.blocks = dict(blocks)
        self.scopes = scopes
        self.gradients = gradients
        self.checkpointing = checkpointing
        self.inspector = BlockInspector(number == 0, state, list(blocks))
        self._device = device
        self._shares_rank = shares_rank
        parameters = (tensor for block in blocks.values() for tensor in block.parameters())
        self.parameters = list(dict.fromkeys(parameters))
        self._in_flight: dict[int, InFlightMicrobatch] = {}
        self._watched: tuple[BeginCall, EndCall] | None = None
        self.input_gradients: Sequence[torch.Tensor | None] = ()
        """The gradients of the inputs in the last backward, while calls are watched."""

    @contextmanager
    def watch(self, begin: BeginCall, end: EndCall) -> Iterator[None]:
        """Watch the calls of the blocks in the body."""
        self._watched = begin, end
        try:
            yield
        finally:
            self._watched = None
            self.input_gradients = ()

    def call_again(self, data: Any) -> Any:
        """Return the output of the blocks; they get copies of the tensors in `data`."""
        return self.inspector.call_in_turn([*self.blocks.values()], clone_tensors(data), "")

    def begin(self, buffers: StageBuffers) -> None:
        """Begin a step without gradients, not even of parameters that another stage owns."""
        self.buffers = buffers
        self.inspector.state.hold()
        self.end()

    def end(self) -> None:
        """End a step; after a failure, discard the micro-batches in flight."""
        self._in_flight = {}
        for parameter in self.parameters:
            parameter.grad = None

    def count_outputs(self, index: int) -> int:
        """Return the number of outputs of a micro-batch that require a gradient."""
        return len(self._in_flight[index].outputs)

    def forward(
        self, step: int, index: int, given: StageInput, where: str, loss: Loss | None
    ) -> StageOutput:
        """Compute a micro-batch.

        Args:
            step: The number of the step.
            index: The number of the micro-batch.
            given: The output of the previous stage, or the data of the micro-batch.
            where: Rank, stage, step and micro-batch, for messages.
            loss: The function that computes the loss, in the last stage; None in other stages.

        Returns:
            The input of the next stage. The last stage keeps the loss for its backward.
        """
        self.buffers.install_copies()
        self.scopes.begin_microbatch(step, index, given.rng_state.last_call)
        blocks = list(self.blocks.values())
        if self._watched is not None:
            self._watched[0](((clone_tensors(given.data),), {}))
        value = self.inspector.call_blocks(blocks, given.data, where)
        if self._watched is not None:
            self._watched[1](value)
        rng_state = RngState(self.scopes.last_call)
        if loss is not None:
            self.scopes.begin_loss()
            before = self.read_rng_state()
            value = self.inspector.compute_loss(loss, value, where)
            rng_state = self.update_rng_state(before, rng_state)
        structure, tensors = self.inspector.flatten_output(value, blocks, given.received, where)
        outputs = [tensor for tensor in tensors if tensor.requires_grad]
        held = self._pause()
        sent = SentTensors(tensors)
        assigned = self.inspector.state.get_assigned()
        self._in_flight[index] = InFlightMicrobatch(
            given.graph_input, outputs, sent, *held, rng_state, assigned
        )
        if given.graph_input is not None:
            given.graph_input.free()
        return StageOutput(structure, tensors, rng_state)

    def backward(
        self,
        index: int,
        gradients: Sequence[torch.Tensor | None] | None,
        tied_roots: TiedRoots,
        rng_state: RngState | None,
        where: str,
    ) -> tuple[list[torch.Tensor | None], RngState]:
        """Run the whole backward of a micro-batch.

        Args:
            index: The number of the micro-batch.
            gradients: The gradients of the outputs that require one; None after a loss.
            tied_roots: Tied parameters, with the sums of later stages.
            rng_state: The random state after the backward of later stages; None after a loss,
                or if no gradients were received.
            where: Rank, stage, step and micro-batch, for messages.

        Returns:
            The gradients of the inputs that require one, and the random state.
        """
        in_flight = self._resume(index, rng_state)
        in_flight.sent.check(where)
        roots, given = _find_roots(in_flight, gradients, tied_roots)
        if roots:
            with self._restore_rng_state(in_flight, where):
                torch.autograd.backward(roots, given)
        self._finish_backward(index)
        return (
            [] if in_flight.graph_input is None else in_flight.graph_input.gradients,
            in_flight.rng_state,
        )

    def backward_inputs(
        self,
        index: int,
        gradients: Sequence[torch.Tensor | None] | None,
        unsplit: Sequence[torch.Tensor],
        tied_roots: TiedRoots,
        rng_state: RngState | None,
        where: str,
    ) -> tuple[list[torch.Tensor | None], RngState]:
        """Run the first part of the backward, with arguments like `backward`.

        `unsplit` are the weights whose gradients belong to this part; see `SplitBackward`.
        """
        in_flight = self._resume(index, rng_state)
        in_flight.sent.check(where)
        roots, given = _find_roots(in_flight, gradients, tied_roots)
        graph_input = in_flight.graph_input
        with self._restore_rng_state(in_flight, where):
            if (
                graph_input is not None
                and graph_input.anchor is not None
                and roots
                and is_splittable(roots)
            ):
                in_flight.split = SplitBackward(roots, graph_input.anchor, unsplit)
                in_flight.split.backward_inputs(given)
            elif roots:
                torch.autograd.backward(roots, given)
        # Empty `.grad`: the first part of the next micro-batch runs before the second part of
        # this one.
        for parameter in self.parameters:
            if parameter.grad is not None:
                in_flight.early[parameter] = parameter.grad
                parameter.grad = None
        in_flight.buffers, in_flight.calls = self._pause()
        in_flight.outputs = []
        return [] if graph_input is None else graph_input.gradients, in_flight.rng_state

    def backward_weights(self, index: int, where: str) -> None:
        """Run the second part of the backward."""
        in_flight = self._resume(index)
        if in_flight.split is not None:
            before = self.read_rng_state()
            with (
                self.inspector.check_backward(where),
                self.inspector.state.restore_assigned(in_flight.assigned),
            ):
                in_flight.split.backward_weights()
            if self.read_rng_state() != before:
                raise LayoutError(
                    f"{where}: a hook of a tensor in the blocks {', '.join(self.blocks)} draws "
                    'random numbers in backward, and schedule="zero-bubble" may call it twice: '
                    "draw them in a hook of a parameter or in an autograd function, or choose "
                    "another schedule"
                )
        for parameter, gradient in in_flight.early.items():
            parameter.grad = gradient
        self._finish_backward(index)

    def take_gradients(
        self, index: int, parameters: Sequence[nn.Parameter]
    ) -> list[torch.Tensor | None]:
        """Return and clear the gradients of parameters that an earlier stage owns."""
        in_flight = self._in_flight.get(index)
        if in_flight is not None:
            return [in_flight.early.pop(parameter, None) for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return gradients

    def finish(self, index: int, share: float) -> None:
        """Add the gradients and buffers of a micro-batch; `share` is its weight in the mean."""
        self.buffers.collect(index, share)
        if self._shares_rank:
            self.buffers.hide()
        self.gradients.accumulate(index)

    # --- several micro-batches together -------------------------------------------------------

    def leave(self) -> PausedBuffers:
        """Remove and return the buffers of a pass, so that another can start."""
        return self._pause()[0]

    @contextmanager
    def return_to(
        self, buffers: PausedBuffers, assigned: list[Assigned], where: str
    ) -> Iterator[None]:
        """Install the buffers of a pass, and what its blocks have assigned, for its backward."""
        self.buffers.resume(buffers)
        try:
            with (
                self.inspector.check_backward(where),
                self.inspector.state.restore_assigned(assigned),
            ):
                yield
        finally:
            self.leave()

    def finish_node(
        self, indices: Sequence[int], shares: Sequence[float], buffers: Sequence[list[torch.Tensor]]
    ) -> None:
        """Add the gradients and buffers of micro-batches that were computed together."""
        for index, share, own in zip(indices, shares, buffers, strict=True):
            self.buffers.collect(index, share, own)
        self.gradients.accumulate_node((indices[0], indices[-1] + 1))

    @contextmanager
    def _restore_rng_state(self, in_flight: InFlightMicrobatch, where: str) -> Iterator[None]:
        """Set the generators, for a backward in the body, to the state of a single process."""
        if in_flight.rng_state.torch_state is None:
            self.scopes.begin_loss(in_flight.rng_state.last_call)
        else:
            set_state_of_torch(in_flight.rng_state.torch_state, self._device)
        before = self.read_rng_state()
        with (
            self.inspector.check_backward(where),
            self.inspector.state.restore_assigned(in_flight.assigned),
        ):
            yield
        in_flight.rng_state = self.update_rng_state(before, in_flight.rng_state)

    def read_rng_state(self) -> bytes:
        """Return the states of torch's generators, for `update_rng_state`."""
        return state_of_torch(self._device)

    def update_rng_state(self, before: bytes, rng_state: RngState) -> RngState:
        """Return the random state, updated if torch's generators have changed since `before`."""
        state = self.read_rng_state()
        return rng_state if state == before else replace(rng_state, torch_state=state)

    def _finish_backward(self, index: int) -> None:
        graph_input = self._in_flight.pop(index).graph_input
        if self._watched is not None and graph_input is not None:
            self.input_gradients = graph_input.gradients
        self.scopes.pause()

    def _pause(self) -> tuple[PausedBuffers, ScopeCalls | None]:
        held = self.buffers.pause(), self.scopes.pause()
        if self._shares_rank:
            self.buffers.hide()
        return held

    def _resume(self, index: int, rng_state: RngState | None = None) -> InFlightMicrobatch:
        in_flight = self._in_flight[index]
        in_flight.rng_state = rng_state or in_flight.rng_state
        self.buffers.resume(in_flight.buffers)
        self.scopes.resume(in_flight.calls)
        return in_flight


def _find_roots(
    in_flight: InFlightMicrobatch,
    gradients: Sequence[torch.Tensor | None] | None,
    tied_roots: TiedRoots,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the tensors at which backward starts, and their gradients."""
    roots: list[torch.Tensor] = [tensor for tensor, _ in tied_roots]
    given: list[torch.Tensor | None] = [gradient for _, gradient in tied_roots]
    for number, output in enumerate(in_flight.outputs):
        gradient = None if gradients is None else gradients[number]
        if gradients is None or gradient is not None:
            roots.append(output)
            given.append(gradient)
    return roots, given
