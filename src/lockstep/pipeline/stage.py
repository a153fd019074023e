"""The stage: a contiguous piece of the model on one rank, forward and backward.

    forward of m    fresh buffers, generators keyed by (seed, step, m), the blocks in turn;
                    what the micro-batch needs until its backward is put into its flight
    backward of m   its buffers and its keys again (a recomputation writes and draws too),
                    torch's generators as the backward of the later stages left them,
                    the gradients of the outputs in, those of the inputs out
    after it        gradients become leaf m of the tree, buffers are kept aside

Several micro-batches may be in flight. The backward is whole, or in its two parts
(`lockstep.pipeline.split_backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lockstep.data.microbatch import Microbatch, map_tensors
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.errors import UsageError
from lockstep.model.activation_checkpointing import Recomputation
from lockstep.model.buffers import Buffers, Paused
from lockstep.model.forward import parts
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.units import Calls, Units
from lockstep.pipeline.aliasing import Arrival, Departure
from lockstep.pipeline.boundary import Pattern
from lockstep.pipeline.draws import NO_DRAWS, Draws
from lockstep.pipeline.graph_entry import Entry
from lockstep.pipeline.inspection import Inspection
from lockstep.pipeline.python_state import Assigned, PythonState
from lockstep.pipeline.split_backward import Split, splittable
from lockstep.randomness import set_state_of_torch, state_of_torch

__all__ = ["Stage", "StageInput", "StageOutput", "first_input"]

Loss = Callable[[Any], torch.Tensor]
"""Gives the scaled loss of the micro-batch from the model's outputs."""

Roots = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that backward begins from besides the outputs, with their gradients."""


@dataclass
class StageInput:
    """What a stage is given of one micro-batch.

    Attributes:
        data: What the first block is given: of the first stage as `called` takes it, of the
            others one value.
        arrival: The tensors in it.
        draws: Of the stages before.
        entry: Where the graph begins; None in the first stage, and in an evaluation.
    """

    data: Any
    arrival: Arrival
    draws: Draws = NO_DRAWS
    entry: Entry | None = None


def first_input(microbatch: Microbatch, parallel: ParallelContext, place: str) -> StageInput:
    """Return what the first stage is given: a micro-batch without its targets."""
    data = parallel.moved(microbatch.data)
    if parallel.loss is None:
        return StageInput(data, Arrival((), ()))
    inputs, targets = parts(data, place)
    return StageInput(inputs, Arrival.of_batch(_tensors_in(inputs), _tensors_in(targets)))


def _tensors_in(data: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(found.append, data)
    return found


@dataclass
class StageOutput:
    """What a stage hands on of one micro-batch: a flattened value, and the draws so far."""

    pattern: Pattern
    tensors: list[torch.Tensor]
    draws: Draws


@dataclass
class Flight:
    """What a micro-batch keeps between its forward and its backward on one stage."""

    entry: Entry | None
    outputs: list[torch.Tensor]
    sent: Departure
    buffers: Paused
    calls: Calls | None
    draws: Draws
    assigned: list[Assigned]
    split: Split | None = None
    early: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)


class Stage:
    """Stage `number` of the model, on this rank.

    Parameters:
        number: in model order; the last of all has the loss.
        named: the modules whose composition it is, in order, by their names in the model.
        units: the keys of their random numbers.
        gradients: the tree of the parameters whose gradients are added here.
        recomputation: of its blocks, in backward.
        device: where it computes.
        state: what its blocks keep in Python.
    """

    def __init__(
        self,
        number: int,
        named: Mapping[str, nn.Module],
        units: Units,
        gradients: GradientReducer,
        recomputation: Recomputation,
        device: torch.device,
        state: PythonState,
    ) -> None:
        self.number = number
        self.named = dict(named)
        self.units = units
        self.gradients = gradients
        self.recomputation = recomputation
        self.inspection = Inspection(number == 0, state)
        self._device = device
        self.parameters = list(
            dict.fromkeys(each for block in named.values() for each in block.parameters())
        )
        self._flights: dict[int, Flight] = {}

    def begin(self, buffers: Buffers) -> None:
        """Begin a step. No gradient is left: also not of a parameter that another stage owns."""
        self.buffers = buffers
        self.end()

    def end(self) -> None:
        """Let go of what is under way, after a failure."""
        self._flights = {}
        for parameter in self.parameters:
            parameter.grad = None

    def outputs(self, leaf: int) -> int:
        """Return how many outputs of a micro-batch have a gradient."""
        return len(self._flights[leaf].outputs)

    def forward(
        self, step: int, leaf: int, given: StageInput, place: str, loss: Loss | None
    ) -> StageOutput:
        """Compute a micro-batch.

        Args:
            step: Its step.
            leaf: Its number.
            given: What the stage before sent, or the data of the micro-batch.
            place: Where the step is, for messages.
            loss: Of the last stage.

        Returns:
            What the next stage is given; a loss is kept for the backward.
        """
        self.buffers.enter()
        self.units.begin(step, leaf, given.draws.call)
        blocks = list(self.named.values())
        value, others = self.inspection.composed(blocks, given.data, place, given.draws.others)
        draws = Draws(self.units.last_call, others)
        if loss is not None:
            self.units.end()
            before = state_of_torch(self._device)
            value = self.inspection.loss(loss, value, place, others)
            draws = self._drawn_since(before, draws)
        pattern, tensors = self.inspection.handed_on(value, blocks, given.arrival, place)
        outputs = [tensor for tensor in tensors if tensor.requires_grad]
        held = self.buffers.pause(), self.units.pause()
        sent, assigned = Departure(tensors), self.inspection.state.assigned()
        self._flights[leaf] = Flight(given.entry, outputs, sent, *held, draws, assigned)
        if given.entry is not None:
            given.entry.leave()
        return StageOutput(pattern, tensors, draws)

    def backward(
        self,
        leaf: int,
        gradients: Sequence[torch.Tensor | None] | None,
        also: Roots,
        draws: Draws | None,
        place: str,
    ) -> tuple[list[torch.Tensor | None], Draws]:
        """Run the whole backward of a micro-batch.

        Args:
            leaf: Its number.
            gradients: Those of the outputs that require one; None after a loss.
            also: Gradients of parameters that later stages share.
            draws: Of the later stages' backward; None after a loss, or where no gradient came.
            place: Where the step is, for messages.

        Returns:
            The gradients of the inputs that have one, and the draws so far.
        """
        flight = self._resumed(leaf, draws)
        flight.sent.check(place)
        roots, given = _roots(flight, gradients, also)
        if roots:
            with self._drawing(flight, place):
                torch.autograd.backward(roots, given)
        self._done(leaf)
        return [] if flight.entry is None else flight.entry.gradients, flight.draws

    def backward_inputs(
        self,
        leaf: int,
        gradients: Sequence[torch.Tensor | None] | None,
        whole: Sequence[torch.Tensor],
        also: Roots,
        draws: Draws | None,
        place: str,
    ) -> tuple[list[torch.Tensor | None], Draws]:
        """Run the first part of the backward, as `backward`; `whole` as `Split` takes it."""
        flight = self._resumed(leaf, draws)
        flight.sent.check(place)
        roots, given = _roots(flight, gradients, also)
        entry = flight.entry
        with self._drawing(flight, place):
            if entry is not None and entry.anchor is not None and roots and splittable(roots):
                flight.split = Split(roots, entry.anchor, whole)
                flight.split.first(given)
            elif roots:
                torch.autograd.backward(roots, given)
        # The next micro-batch's first part comes before this one's second.
        for parameter in self.parameters:
            if parameter.grad is not None:
                flight.early[parameter] = parameter.grad
                parameter.grad = None
        flight.buffers, flight.calls = self.buffers.pause(), self.units.pause()
        flight.outputs = []
        return [] if entry is None else entry.gradients, flight.draws

    def backward_weights(self, leaf: int, place: str) -> None:
        """Run the second part of the backward."""
        flight = self._resumed(leaf)
        if flight.split is not None:
            before = state_of_torch(self._device)
            with self.inspection.state.put_back(flight.assigned):
                flight.split.second()
            if state_of_torch(self._device) != before:
                raise UsageError(
                    f"{place}: a hook of a tensor in the blocks {', '.join(self.named)} draws "
                    'random numbers in backward, and schedule="zero-bubble" may call it twice: '
                    "draw them in a hook of a parameter or in an autograd function, or take "
                    "another schedule"
                )
        for parameter, gradient in flight.early.items():
            parameter.grad = gradient
        self._done(leaf)

    def taken(self, leaf: int, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
        """Take out the gradients of parameters that an earlier stage owns."""
        flight = self._flights.get(leaf)
        if flight is not None:
            return [flight.early.pop(parameter, None) for parameter in parameters]
        found = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return found

    def finish(self, leaf: int, share: float) -> None:
        """Take the gradients of a micro-batch, and its buffers; `share` is its part of them."""
        self.buffers.leave(leaf, share)
        self.gradients.accumulate(leaf)

    @contextmanager
    def _drawing(self, flight: Flight, place: str) -> Iterator[None]:
        """Let the body run a backward that draws as it would in one process."""
        if flight.draws.state is None:
            self.units.end(flight.draws.call)
        else:
            set_state_of_torch(flight.draws.state, self._device)
        before = state_of_torch(self._device)
        with self.inspection.backward(place), self.inspection.state.put_back(flight.assigned):
            yield
        flight.draws = self._drawn_since(before, flight.draws)

    def _drawn_since(self, before: bytes, draws: Draws) -> Draws:
        """Return `draws` with what has been drawn from torch's generators since a state."""
        state = state_of_torch(self._device)
        return draws if state == before else replace(draws, state=state)

    def _done(self, leaf: int) -> None:
        del self._flights[leaf]
        self.units.pause()

    def _resumed(self, leaf: int, draws: Draws | None = None) -> Flight:
        flight = self._flights[leaf]
        flight.draws = draws or flight.draws
        self.buffers.resume(flight.buffers)
        self.units.resume(flight.calls)
        return flight


def _roots(
    flight: Flight, gradients: Sequence[torch.Tensor | None] | None, also: Roots
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return what backward begins from, and its gradients."""
    roots: list[torch.Tensor] = [tensor for tensor, _ in also]
    given: list[torch.Tensor | None] = [gradient for _, gradient in also]
    for number, output in enumerate(flight.outputs):
        gradient = None if gradients is None else gradients[number]
        if gradients is None or gradient is not None:
            roots.append(output)
            given.append(gradient)
    return roots, given
